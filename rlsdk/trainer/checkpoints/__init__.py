"""A run's folder and the checkpoints in it: written, verified, found."""
