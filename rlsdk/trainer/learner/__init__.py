"""The learner: an algorithm's updates on a run's models, their metrics, and warnings if nothing is learned."""
