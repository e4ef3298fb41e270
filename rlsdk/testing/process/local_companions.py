"""Companions (`rlsdk.kit.ranks.companions`) as processes of this machine: tests engines that span nodes on one machine.

The engine's context names different nodes (`RankContext.device_nodes`), but every process runs on this host. They
connect over loopback and share no memory, because an engine does not use shared memory across nodes.
"""

from __future__ import annotations

import importlib
import itertools
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

from rlsdk.interfaces import WorkerError
from rlsdk.kit.ranks.companions import use_companions

LOOK_S = 0.05


class LocalCompanion:
    """One process. It ends with this process, because its pipe closes."""

    def __init__(self, target: str, args: Sequence[Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        # Not a daemon: daemons may not have children, but an engine has.
        self.process = context.Process(target=_serve, args=(there, list(sys.path)))
        self.process.start()
        there.close()
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._read, name="rlsdk-companion", daemon=True).start()
        self.made = self.call("", target, args)

    def call(self, method: str, *args: Any) -> Future[Any]:
        """See `Companion.call`; without a method name it creates the object."""
        future: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = future
            try:
                self._pipe.send((number, method, args))
            except OSError as error:
                del self._waiting[number]
                future.set_exception(WorkerError(f"the companion is gone: {error}"))
        return future

    def end(self) -> None:
        """Kills it."""
        self.process.kill()
        self.process.join()

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                number, value, error = self._pipe.recv()
                with self._lock:
                    future = self._waiting.pop(number)
                if error is None:
                    future.set_result(value)
                else:
                    future.set_exception(error)
        with self._lock:
            lost, self._waiting = list(self._waiting.values()), {}
        for future in lost:
            future.set_exception(WorkerError("the companion is gone"))


class LocalCompanions:
    """The companions of this process."""

    address = "127.0.0.1"

    def __init__(self) -> None:
        self.started: list[LocalCompanion] = []

    def start(self, bundle: int, target: str, *args: Any) -> tuple[LocalCompanion, Future[Any]]:
        """See `Companions.start`; the node of the bundle is this machine."""
        companion = LocalCompanion(target, args)
        self.started.append(companion)
        return companion, companion.made


@contextmanager
def local_companions() -> Iterator[LocalCompanions]:
    """In this context, companions of this process are started on this machine; all have ended after it."""
    made = LocalCompanions()
    use_companions(made)
    try:
        yield made
    finally:
        use_companions(None)
        for companion in made.started:
            companion.end()


def look_until_error(look: Callable[[], Any], within_s: float = 20.0) -> None:
    """Calls `look` repeatedly and raises its first exception; returns if there is none within this time."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        look()
        time.sleep(LOOK_S)


def _serve(pipe: Connection, paths: Sequence[str]) -> None:
    """Main function of the process."""
    sys.path += [path for path in paths if path not in sys.path]
    lock = threading.Lock()
    held: dict[str, Any] = {}

    def answer(number: int, method: str, args: Sequence[Any]) -> None:
        value, error = None, None
        try:
            if method:
                value = getattr(held["object"], method)(*args)
            else:
                target, arguments = args
                module, _, name = target.partition(":")
                held["object"] = getattr(importlib.import_module(module), name)(*arguments)
        except BaseException as raised:
            error = raised
        with lock, suppress(OSError):
            pipe.send((number, value, error))

    with suppress(EOFError, OSError):
        while True:
            threading.Thread(target=answer, args=pipe.recv(), daemon=True).start()
