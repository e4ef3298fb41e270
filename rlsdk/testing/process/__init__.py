"""What a test process needs: tiny models, plain references, worlds of ranks, and a count of what is left behind."""
