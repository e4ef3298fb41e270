"""The live page of a run, served to browsers on this machine."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from rlsdk.interfaces import ConfigError
from rlsdk.system.bounded_http import BoundedHandler, BoundedServer, ConnectionLimits
from rlsdk.system.files import UnfitFileError
from rlsdk.system.printable import encodable
from rlsdk.trainer.checkpoints.run_end import is_locked
from rlsdk.views.report.markup import document, escaped
from rlsdk.views.report.page import run_page, window_title
from rlsdk.views.report.record import FILES, read_run

LOOPBACK = "127.0.0.1"
NEWS = "/news"
REQUEST_S = 10.0
"""Seconds for a whole request to arrive, and for the whole page to be read."""
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class LivePage:
    """The current page of a run's folder. Only reads; thread-safe."""

    def __init__(self, run_dir: Path) -> None:
        """
        Raises:
            ConfigError: there is no such folder.
        """
        if not run_dir.is_dir():
            raise ConfigError(f"{str(run_dir)!r} is not the folder of a run: give one, as in `rlsdk watch runs/NAME`")
        self.run_dir = run_dir.resolve()
        self._lock = threading.Lock()
        self._made: tuple[str, str, str, Mapping[str, Any]] = ("", "", "", {})

    @property
    def mark(self) -> str:
        """A value that changes whenever a displayed file changes."""
        stats = []
        for name in FILES:
            try:
                found = (self.run_dir / name).stat()
                stats.append(f"{found.st_size}.{found.st_mtime_ns}")
            except OSError:
                stats.append("-")
        return "_".join([*stats, str(is_locked(self.run_dir))])

    def whole(self) -> str:
        """The whole page."""
        mark, title, main, data = self._now()
        return document(title, main, data, live=(NEWS, mark), now=time.time())

    def news(self, after: str) -> str | None:
        """JSON update for a page with the mark `after`; None: nothing changed."""
        if after == self.mark:
            return None
        mark, _, main, data = self._now()
        return json.dumps({"mark": mark, "main": main, "data": data}, allow_nan=False)

    def _now(self) -> tuple[str, str, str, Mapping[str, Any]]:
        with self._lock:
            mark = self.mark
            if self._made[0] != mark or not mark:
                self._made = (mark, *self._make())
            return self._made

    def _make(self) -> tuple[str, str, Mapping[str, Any]]:
        try:
            record = read_run(self.run_dir)
            return window_title(record), *run_page(record, is_live=True)
        except UnfitFileError as error:
            refused = f"<p>{escaped(f'{error.filename} {error.strerror}')}</p>"
            return self.run_dir.name, f"<h1>{escaped(self.run_dir.name)}</h1>{refused}", {"steps": [], "charts": []}
        except (ConfigError, OSError):
            waiting = f"<h1>{escaped(self.run_dir.name)}</h1><p>No step is done yet. This page shows the first one.</p>"
            return self.run_dir.name, waiting, {"steps": [], "charts": []}


class LiveServer(BoundedServer):
    """Listens on the loopback interface only. No token: every account on this machine can read the page.

    Requests with another host name are refused: otherwise a web page whose name resolves to this machine ("DNS
    rebinding") could read the run.
    """

    def __init__(self, page: LivePage, port: int = 0) -> None:
        """
        Args:
            page: what is served.
            port: 0: any free one.

        Raises:
            ConfigError: the port is taken.
        """
        try:
            super().__init__((LOOPBACK, port), _Handler, ConnectionLimits(transfer_s=REQUEST_S, request_bytes=1 << 20))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"--port {port}: cannot listen there: {reason}; give another one, or 0 for any"
            ) from error
        self.page = page

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.server_address[1]}/"

    @property
    def hosts(self) -> frozenset[str]:
        """Accepted values of the `Host` header."""
        port = self.server_address[1]
        return frozenset(f"{name}:{port}" for name in (LOOPBACK, "localhost"))


class _Handler(BoundedHandler):
    server: LiveServer

    def do_GET(self) -> None:  # noqa: N802 - the name that `http.server` calls
        self.server.end_request(self.request)
        if self.headers.get("Host", "").lower() not in self.server.hosts:
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", "this server answers under its own address only\n")
            return
        if self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", "this server answers its own page only\n")
            return
        asked = urlsplit(self.path)
        if asked.path == "/":
            self._answer(HTTPStatus.OK, "text/html", self.server.page.whole())
        elif asked.path == NEWS:
            news = self.server.page.news(parse_qs(asked.query).get("after", [""])[0])
            if news is None:
                self._answer(HTTPStatus.NOT_MODIFIED, "application/json", "")
            else:
                self._answer(HTTPStatus.OK, "application/json", news)
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", "there is one page here: /\n")

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        self.send(status, f"{kind}; charset=utf-8", encodable(text).encode(), HEADERS)
