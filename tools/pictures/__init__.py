"""Pictures of docs/concepts.md, drawn from the schedule, the planner and the placement that runs use."""
