"""The schedule: which groups are made when, as a pure state machine, and the seeds of requests."""
