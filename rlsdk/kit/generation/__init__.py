"""What rollout engines serve requests with: checks, sampling, stop strings, samples that grow."""
