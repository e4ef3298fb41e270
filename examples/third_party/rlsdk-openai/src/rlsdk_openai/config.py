"""Options of the backend `openai`. Imports no engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class OpenAiOptions:
    """What only this backend knows; a command gets them as `--rollout.openai.OPTION`."""

    url: str = "http://127.0.0.1:8000/v1"
    """Of the server, as far as `/completions`."""
    model: str | None = None
    """Name under which the server has the model. None: the first that it lists."""
    api_key_variable: str = "OPENAI_API_KEY"
    """Environment variable that holds the key, for servers that want one: keys do not belong into configurations."""
    timeout_s: float = 600.0
    """Of one request."""
    max_requests: int = 32
    """Requests under way at once."""
