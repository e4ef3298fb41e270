"""The server: OpenAI's dialects over HTTP, and the sessions behind it."""
