"""What overlap of training and generation gains, measured, and what the simulator says of it."""
