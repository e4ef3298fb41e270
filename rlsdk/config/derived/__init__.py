"""What follows from a configuration alone: its roles, and the forward passes of a step."""
