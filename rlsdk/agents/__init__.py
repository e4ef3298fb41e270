"""Programs that make episodes: environments with tools, agents over an OpenAI-compatible gateway, chats of models."""
