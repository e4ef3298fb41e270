"""Keeps the sandbox of an episode: starts its confined interpreters, and ends them with their time, memory or parent.

`rlsdk.agents` starts this script as `python -I -S -B keeper.py`, and speaks to it in lines of JSON. It runs no program
of a model itself: that happens in processes that it forks (`cells.py`), each kind of cell in a PID namespace of its own
where the system allows it. They share the files and the network of the sandbox.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import select
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

if not TYPE_CHECKING:
    # The package need not be importable here: its modules are loaded by path, under their full names.
    for _name in (
        "landlock",
        "system_calls",
        "measures",
        "sandbox_child",
        "room",
        "cells",
        "processes",
        "interpreters",
    ):
        _path = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{_name}.py")
        _found = importlib.util.spec_from_file_location(f"rlsdk.confinement.{_name}", _path)
        sys.modules[_found.name] = importlib.util.module_from_spec(_found)
        _found.loader.exec_module(sys.modules[_found.name])
        setattr(sys.modules.setdefault("rlsdk.confinement", type(sys)("rlsdk.confinement")), _name,
                sys.modules[_found.name])  # fmt: skip

from rlsdk.confinement import cells
from rlsdk.confinement.interpreters import Interpreter
from rlsdk.confinement.processes import children, descendants, resident
from rlsdk.confinement.room import Room

_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 4, 36
_WATCH_S, _IDLE_WATCH_S = 0.05, 2.0
_START_S, _CODE_S = 20.0, 0.5
_MOST_LINE = 1 << 20
"""Bytes that an interpreter says of a cell, output apart; of a file: more, by its size."""


class EndedError(Exception):
    """An interpreter has ended, or had to be."""

    def __init__(self, why: str, *, timed_out: bool = False, is_dead: bool = False) -> None:
        super().__init__(why)
        self.timed_out, self.is_dead = timed_out, is_dead


class Output:
    """Beginning and end of what a cell wrote."""

    def __init__(self, most: int) -> None:
        self._most, self._head, self._tail, self._count = most, b"", b"", 0

    def add(self, data: bytes) -> None:
        self._count += len(data)
        room = self._most // 2 - len(self._head)
        self._head, data = self._head + data[:room], data[room:]
        self._tail = (self._tail + data)[-(self._most - self._most // 2) :]

    def text(self) -> tuple[str, int]:
        """What is kept, and the number of bytes that are not."""
        cut = self._count - len(self._head) - len(self._tail)
        note = f"\n[... {cut} bytes left out ...]\n".encode() if cut else b""
        return (self._head + note + self._tail).decode("utf-8", "replace"), cut


class Keeper:
    """Answers the parent until it ends."""

    def __init__(self, job: dict[str, Any], room: Room, proc: int, parent: int) -> None:
        self._parent_id = os.getppid()
        self._job, self._room, self._proc = job, room, proc
        self._interpreters: dict[str, Interpreter] = {}
        self._lost: dict[str, str] = {}
        """Kind -> why its interpreter ended between two cells."""
        self._until = time.monotonic() + job["life_s"]
        self._parent = parent
        self._poll = select.poll()
        if parent >= 0:
            self._poll.register(parent, select.POLLIN)

    def start(self) -> dict[str, Any]:
        """Starts the interpreter of files, which tells what confines it."""
        return self._interpreter(cells.FILES)[1]

    def serve(self) -> None:
        """Answers requests, a line each, until the parent ends or closes its side."""
        waiting = b""
        while True:
            while b"\n" not in waiting:
                self._wait(0, _IDLE_WATCH_S)
                data = _read(0)
                if data == b"":
                    return
                waiting += data or b""
            line, _, waiting = waiting.partition(b"\n")
            _send(self._answer(json.loads(line)))

    def close(self) -> None:
        """Ends all processes of the sandbox."""
        for kind in [*self._interpreters]:
            self._end(kind)
        self._kill_orphans()

    def _answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        kind, seconds = asked["kind"], float(asked["seconds"])
        out, err = Output(self._job["output_bytes"]), Output(self._job["output_bytes"])
        found: dict[str, Any] = {"code": 0, "ended": self._lost.pop(kind, ""), "timed_out": False}
        try:
            interpreter, _ = self._interpreter(kind)
            found |= _plain(self._cell(interpreter, asked["text"], seconds, out, err))
        except EndedError as ended:
            self._drain(kind, out, err)
            code = self._end(kind, _CODE_S if ended.is_dead else 0.0)
            found |= {"code": code, "ended": str(ended), "timed_out": ended.timed_out}
        (found["stdout"], cut), (found["stderr"], more) = out.text(), err.text()
        return {**found, "cut": cut + more}

    def _interpreter(self, kind: str) -> tuple[Interpreter, dict[str, Any]]:
        """The interpreter of a kind, started if there is none; and what a new one said of its confinement."""
        if (known := self._interpreters.get(kind)) is not None:
            return known, {}
        made = self._interpreters[kind] = Interpreter(self._room, kind)
        return made, self._line(made, _START_S)

    def _cell(self, made: Interpreter, text: str, seconds: float, out: Output, err: Output) -> dict[str, Any]:
        self._watch(made)
        made.asked += 1
        data = text.encode("utf-8", "surrogatepass")
        framed = data + b"\0" if made.kind == cells.SHELL else len(data).to_bytes(8, "big") + data
        said = self._line(made, seconds, framed, (out, err))
        self._drain(made.kind, out, err)
        return said

    def _line(
        self, made: Interpreter, seconds: float, request: bytes = b"", outputs: tuple[Output, Output] | None = None
    ) -> dict[str, Any]:
        """Sends a request, and reads the line that answers it; output is kept meanwhile.

        Raises:
            EndedError: the interpreter ended, or exceeded a limit.
        """
        most = _MOST_LINE + (2 * self._job["files_mb"] << 20 if made.kind == cells.FILES else 0)
        streams = dict(zip((made.stdout, made.stderr), outputs or (), strict=False))
        line, watched = b"", time.monotonic()
        deadline = watched + seconds
        while True:
            now = time.monotonic()
            if now >= deadline:
                raise EndedError(f"it took more than {seconds:g} s", timed_out=True)
            if now - watched >= _WATCH_S:
                watched = now
                self._watch(made)
            for fd in self._wait_for(made, streams, bool(request), min(_WATCH_S, deadline - now)):
                if fd == made.requests:
                    request = request[_write(fd, request) :]
                elif fd in streams:
                    streams[fd].add(_read(fd) or b"")
                elif (data := _read(fd)) == b"":
                    raise EndedError("its interpreter ended", is_dead=True)
                else:
                    line += data or b""
            while b"\n" in line:
                first, _, line = line.partition(b"\n")
                if (said := _said(first)).get("number") == made.asked:
                    return said
            if len(line) > most:
                raise EndedError("its interpreter said too much")

    def _wait_for(self, made: Interpreter, streams: dict[int, Output], is_asking: bool, seconds: float) -> list[int]:
        """Files of an interpreter that are ready. Ends this process if the parent has ended."""
        poll = select.poll()
        poll.register(0, 0)  # its end only
        if self._parent >= 0:
            poll.register(self._parent, select.POLLIN)
        for fd in (made.results, *streams):
            poll.register(fd, select.POLLIN)
        if is_asking:
            poll.register(made.requests, select.POLLOUT)
        ready = [fd for fd, _ in poll.poll(seconds * 1000)]
        self._leave_if(0 in ready or self._parent in ready)
        # A background process may close an output: then it is always ready, and says nothing.
        return ready

    def _wait(self, fd: int, seconds: float) -> None:
        """Waits for a request; meanwhile limits hold for what cells left behind."""
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        if self._parent >= 0:
            poll.register(self._parent, select.POLLIN)
        while True:
            ready = [found for found, _ in poll.poll(seconds * 1000)]
            self._leave_if(self._parent in ready)
            if ready:
                return
            self._leave_if(False)
            for kind, made in [*self._interpreters.items()]:
                try:
                    self._watch(made)
                except EndedError as ended:
                    self._lost[kind] = f"{ended} between two cells"
                    self._end(kind)

    def _leave_if(self, is_left: bool) -> None:
        if is_left or time.monotonic() > self._until or (self._parent < 0 and os.getppid() != self._parent_id):
            self.close()
            os._exit(0)

    def _watch(self, made: Interpreter) -> None:
        """Raises `EndedError` where an interpreter's processes exceed what they may use together."""
        most, most_mb = self._job["processes"], self._job["memory_mb"]
        found = descendants(self._proc, made.pid, most + 8)
        if len(found) > most + 1:  # and the first process of the namespace
            raise EndedError(f"it had more than {most} processes")
        if sum(resident(self._proc, pid) for pid in found) > most_mb << 20:
            raise EndedError(f"its processes took more than {most_mb} MiB of memory")

    def _drain(self, kind: str, out: Output, err: Output) -> None:
        """Takes what is written already, without waiting."""
        if (made := self._interpreters.get(kind)) is None:
            return
        for fd, kept in ((made.stdout, out), (made.stderr, err)):
            for _ in range(64):
                if not (data := _read(fd)):
                    break
                kept.add(data)

    def _end(self, kind: str, grace_s: float = 0.0) -> int:
        code = self._interpreters.pop(kind).end(grace_s) if kind in self._interpreters else 0
        self._kill_orphans()
        return code

    def _kill_orphans(self) -> None:
        """Kills processes whose parents have ended; there are some where there are no PID namespaces only."""
        for _ in range(1000):
            known = {made.pid for made in self._interpreters.values()}
            orphans = [pid for pid in children(self._proc, os.getpid()) if pid not in known]
            if not orphans:
                return
            below = [pid for orphan in orphans for pid in descendants(self._proc, orphan, 10_000)]
            for pid in [*orphans, *below]:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            for pid in orphans:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)


def _said(line: bytes) -> dict[str, Any]:
    """A line of an interpreter, of JSON unless a cell wrote it."""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def _plain(said: dict[str, Any]) -> dict[str, Any]:
    """What an interpreter may say of a cell: a cell can write there, too."""
    kept = {name: said[name] for name in ("error", "content", "refused") if isinstance(said.get(name), str)}
    return {**kept, **({"code": said["code"] & 0xFF} if isinstance(said.get("code"), int) else {})}


def _read(fd: int) -> bytes | None:
    """What is there; empty: its end, None: nothing yet."""
    try:
        return os.read(fd, 65_536)
    except BlockingIOError:
        return None


def _write(fd: int, data: bytes) -> int:
    try:
        return os.write(fd, data[:65_536])
    except BlockingIOError:
        return 0
    except BrokenPipeError:  # the end of its results tells
        return len(data)


def _send(answer: dict[str, Any]) -> None:
    data = json.dumps(answer).encode() + b"\n"
    while data:
        data = data[os.write(1, data) :]


def _first_line() -> dict[str, Any]:
    line = b""
    while not line.endswith(b"\n"):
        if not (data := os.read(0, 1)):
            os._exit(0)
        line += data
    job: dict[str, Any] = json.loads(line)
    return job


def main() -> None:
    """Confines, says `ready` or why it cannot, and serves."""
    job = _first_line()
    try:
        parent = os.pidfd_open(os.getppid())
    except (OSError, AttributeError):
        parent = -1  # it is asked for now and then
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    library = ctypes.CDLL(None)
    library.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        keeper = Keeper(job, Room(job), proc, parent)
        library.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
        said = keeper.start()
    except (OSError, EndedError) as error:
        _send({"refused": str(error)})
        return
    _send(said)
    try:
        keeper.serve()
    finally:
        keeper.close()


if __name__ == "__main__":
    main()
