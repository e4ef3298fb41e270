"""HTTP client for reward services: requests with retries, within limits on time and size."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rlsdk.interfaces import ConfigError
from rlsdk.interfaces.settings import RequestSettings
from rlsdk.rewards.scores.definitions import FailureKind

if TYPE_CHECKING:
    # Imported only where a client is created: every run imports this module, and httpx also imports a command line.
    import httpx

RETRIED = frozenset({408, 425, 429, *range(500, 600)} - {501, 505})
"""Status codes that may pass: too early, too busy, or an error of the server."""
OF_SAMPLES = frozenset({400, 413, 422, *range(500, 600)} - {501, 505})
"""Status codes of which a single sample of a request may be the cause."""
_SHOWN = 200
"""Maximum number of bytes of a response that an error shows."""


@dataclass(frozen=True, kw_only=True)
class RemoteOptions(RequestSettings):
    """Settings of requests to a service, with its secrets."""

    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Headers of every request. They may contain secrets, and are never shown."""


class RemoteError(Exception):
    """A failed request; the message gives the reason and the URL."""

    def __init__(
        self,
        message: str,
        *,
        kind: FailureKind = FailureKind.SERVICE,
        again: bool = False,
        of_sample: bool = False,
        wait_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.again = again
        """Whether a retry may help."""
        self.of_sample = of_sample
        """Whether a single sample of the request may be the cause."""
        self.wait_s = wait_s
        """Seconds that the service asks to wait before a retry."""


class HttpClient:
    """Sends JSON and returns bytes. Use it on one event loop only."""

    def __init__(self, options: RemoteOptions) -> None:
        import httpx

        self._options = options
        self._http = httpx.AsyncClient(
            headers={**options.headers, "Accept": "application/json", "Accept-Encoding": "identity"},
            timeout=None,
            follow_redirects=False,
            trust_env=False,  # no proxies, and no passwords from a .netrc
            limits=httpx.Limits(max_connections=options.max_concurrent),
        )

    async def post(self, url: str, body: bytes, *, retries: int | None = None) -> bytes:
        """Posts JSON and returns the body of the response.

        Args:
            url: where to.
            body: JSON.
            retries: None: as many as the options say.

        Raises:
            RemoteError: the status is not 200, or the response exceeds the limits on time or size.
        """
        return await self._with_retries("POST", url, body, self._options.retries if retries is None else retries)

    async def get(self, url: str) -> bytes:
        """Sends a GET request; otherwise like `post`."""
        return await self._with_retries("GET", url, None, self._options.retries)

    async def close(self) -> None:
        await self._http.aclose()

    async def _with_retries(self, method: str, url: str, body: bytes | None, retries: int) -> bytes:
        for attempt in range(retries + 1):
            try:
                async with asyncio.timeout(self._options.timeout_s):
                    return await self._once(method, url, body)
            except TimeoutError:
                limit = f"{self._options.timeout_s:g} s"
                raise RemoteError(f"{url} did not answer within {limit}", kind=FailureKind.TIMEOUT) from None
            except RemoteError as error:
                if not error.again or attempt == retries:
                    tries = f" ({attempt + 1} attempts)" if attempt else ""
                    raise RemoteError(f"{error}{tries}", kind=error.kind, of_sample=error.of_sample) from error
                asked_s = min(error.wait_s, self._options.timeout_s)
            await asyncio.sleep(max(asked_s, self._options.retry_wait_s * 2**attempt) * random.uniform(1.0, 1.2))
        raise AssertionError("unreachable")

    async def _once(self, method: str, url: str, body: bytes | None) -> bytes:
        import httpx

        try:
            sent = {} if body is None else {"Content-Type": "application/json"}
            async with self._http.stream(method, url, content=body, headers=sent) as response:
                return await self._read(url, response)
        except httpx.TransportError as error:
            why = str(error) or type(error).__name__
            dropped = not isinstance(error, httpx.ConnectError)
            raise RemoteError(f"{url} cannot be reached: {why}", again=True, of_sample=dropped) from error
        except httpx.HTTPError as error:
            raise RemoteError(f"{url}: {type(error).__name__}: {error}") from error

    async def _read(self, url: str, response: httpx.Response) -> bytes:
        """Reads the body up to the size limit; for an error status, only the beginning."""
        status = response.status_code
        if response.is_redirect:
            target = response.headers.get("Location", "nowhere")
            raise RemoteError(
                f"{url} redirects to {target!r}, which is not followed; name the URL that it redirects to"
            )
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise RemoteError(f"{url} answered compressed data, which was not requested")
        data = bytearray()
        limit = self._options.max_response_bytes if status == HTTPStatus.OK else _SHOWN
        async for part in response.aiter_raw():
            data += part
            if len(data) > limit:
                break
        if status != HTTPStatus.OK:
            raise RemoteError(
                f"{url} answered {status}: {shown(bytes(data))}",
                again=status in RETRIED,
                of_sample=status in OF_SAMPLES,
                wait_s=_seconds(response.headers.get("Retry-After", "")),
            )
        if len(data) > limit:
            raise RemoteError(f"{url} answered more than max_response_bytes {limit}", of_sample=True)
        return bytes(data)


def check_url(url: str) -> str:
    """Returns the URL if it can be used.

    Raises:
        ConfigError: it is not an HTTP URL, has no host, or contains a password.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"reward {url!r}: {error}; expected a URL such as http://127.0.0.1:8700/score") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ConfigError(f"reward {url!r}: expected a URL such as http://127.0.0.1:8700/score")
    if parts.username is not None or parts.password is not None:
        raise ConfigError(
            f"reward http(s)://...@{parts.hostname}: a URL with a password would be written into the run's folder; "
            "name an environment variable in remote.token_env"
        )
    return url


def _seconds(retry_after: str) -> float:
    """The number of seconds of a `Retry-After` header; 0 if it has none."""
    return float(retry_after) if retry_after.isascii() and retry_after.isdigit() else 0.0


def shown(data: bytes) -> str:
    """Returns the beginning of a response, for error messages."""
    text = data[:_SHOWN].decode("utf-8", "replace")
    return repr(text) + ("..." if len(data) > _SHOWN else "")
