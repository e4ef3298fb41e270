"""Requirements for rollout engines, a module for each thing that is asked."""
