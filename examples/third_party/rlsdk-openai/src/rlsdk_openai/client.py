"""The few calls of the protocol that are needed, with the standard library alone."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from rlsdk.interfaces import ConfigError, DeadlineError, WorkerError
from rlsdk_openai.config import OpenAiOptions

MAX_SHOWN = 500
"""Characters of a server's answer that an error shows."""


class Client:
    """One server."""

    def __init__(self, options: OpenAiOptions) -> None:
        self.options = options
        self._url = options.url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if key := os.environ.get(options.api_key_variable):
            self._headers["Authorization"] = f"Bearer {key}"

    def models(self) -> list[str]:
        """Names of what the server has.

        Raises:
            ConfigError: nobody answers there, or not as such a server does.
        """
        try:
            return [str(model["id"]) for model in self._ask("/models", None)["data"]]
        except (WorkerError, KeyError, TypeError) as error:
            raise ConfigError(
                f"rollout.openai.url {self.options.url!r}: no OpenAI-compatible server answers there ({error}); start "
                "one, or give the address up to and with /v1"
            ) from error

    def complete(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one completion request.

        Raises:
            DeadlineError: it did not come in time.
            WorkerError: the server refused, or is gone.
        """
        return self._ask("/completions", request)

    def _ask(self, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data=data, headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=self.options.timeout_s) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except TimeoutError as error:
            raise DeadlineError(f"{self._url}{path} did not answer within {self.options.timeout_s:g} s") from error
        except urllib.error.HTTPError as error:
            said = error.read(MAX_SHOWN).decode(errors="replace")
            raise WorkerError(f"{self._url}{path} answered {error.code}: {said}") from error
        except (OSError, ValueError) as error:
            raise WorkerError(f"{self._url}{path} could not be asked: {error}") from error
