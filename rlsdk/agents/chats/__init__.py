"""How the chat of a model is written and read, by its own template."""
