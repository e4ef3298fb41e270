"""What every conformance suite is made of: its base, requirements, reports, and the processes that share it."""
