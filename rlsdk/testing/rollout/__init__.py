"""The harness of the suite for rollout engines: requests, a recorder, an oracle and statistics of draws."""
