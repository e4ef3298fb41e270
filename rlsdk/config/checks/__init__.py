"""What a run would be refused for: backends, context length, and options that its command does not read."""
