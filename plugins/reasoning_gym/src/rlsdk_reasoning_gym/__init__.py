"""The grader of reasoning-gym's tasks, and its scorers without `eval`."""
