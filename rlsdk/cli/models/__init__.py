"""Commands on trained models and on rewards: evaluate, generate, upload, serve."""
