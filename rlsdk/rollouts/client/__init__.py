"""The request client: every replica of a rollout engine behind one queue, and the engine's side of it."""
