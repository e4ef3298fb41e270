"""Programs that make episodes: environments with tools, and how a model's chat is written and read."""
