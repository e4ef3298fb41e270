"""The built-in sandbox: confined processes of this machine, which need no container and no rights."""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import rlsdk.confinement
from rlsdk.interfaces import ConfigError, Ran, SandboxError
from rlsdk.system.temporary import HeldFolder

ESSENTIAL = ("no new privileges", "reads of listed files", "writes to", "no network", "network by", "no tracing")
"""Beginnings of what must hold; where one is missing the sandbox is refused."""
_KEEPER = Path(rlsdk.confinement.__file__).with_name("keeper.py")
_START_S, _GRACE_S, _FILE_S = 30.0, 10.0, 20.0
_MOST_CELL = 1_000_000
"""Characters of a cell."""


class ConfinedSandbox:
    """Satisfies `Sandbox`.

    Its processes read the interpreter, the system's programs and `read`, write to a folder of their own, have no
    network, and end with `close`, with this process however it ends, or after `life_s`.
    """

    def __init__(
        self,
        *,
        seconds: float = 10.0,
        memory_mb: int = 512,
        files_mb: int = 64,
        processes: int = 64,
        output_chars: int = 16_000,
        read: Sequence[str] = (),
        ports: Sequence[int] = (),
        packages: bool = False,
        life_s: float = 3600.0,
        namespaces: bool = True,
    ) -> None:
        """Args:
            seconds: of a cell, after which it and all that it started are killed.
            memory_mb: MiB of memory of all processes of a kind of cell together, and of address space of each.
            files_mb: MiB of all files.
            processes: most processes at a time.
            output_chars: of standard output, and of standard error, of a cell; the middle of longer ones is left out.
            read: further files and folders that can be read: absolute paths.
            ports: TCP ports that can be connected to, on any host, this one included; none: no network.
            packages: whether Python cells find the packages of this environment, and not only the standard library.
            life_s: seconds after which the sandbox ends by itself.
            namespaces: use namespaces where the system allows them; False: only Landlock and seccomp.

        Raises:
            ConfigError: a value is none.
            SandboxError: this system cannot confine processes; says what it lacks.
        """  # fmt: skip
        _check_numbers(seconds=seconds, memory_mb=memory_mb, files_mb=files_mb, processes=processes,
                       output_chars=output_chars, life_s=life_s)  # fmt: skip
        _check_lists(read, ports)
        self._seconds, self._files_mb = seconds, files_mb
        self._lock = threading.Lock()
        self._folder = HeldFolder("sandbox")
        self._process: subprocess.Popen[bytes] | None = None
        job = {
            "folder": self._folder.path, "user_home": os.path.expanduser("~"),
            "memory_mb": memory_mb, "files_mb": files_mb, "processes": processes, "output_bytes": output_chars,
            "read": [*read], "ports": [*ports], "life_s": life_s, "namespaces": namespaces,
        }  # fmt: skip
        try:
            self._process = _start(self._folder.path, packages=packages)
            said = self._exchange(job, _START_S)
            self.held: tuple[str, ...] = tuple(said.get("held", ()))
            """Measures that confine its processes."""
            self.missing: tuple[str, ...] = tuple(said.get("missing", ()))
            """Those that this system does not support, and why."""
            self.home = str(said.get("home", ""))
            """Its folder, as its processes see it."""
            _check_confined(said, self.missing)
        except BaseException:
            self.close()
            raise

    def python(self, code: str, *, seconds: float | None = None) -> Ran:
        """See `Sandbox`."""
        said, found = self._cell("python", code, seconds)
        error = said.get("error")
        if not isinstance(error, str):
            return found
        return Ran(**{**vars(found), "code": 1, "stderr": f"{found.stderr}{error}"})

    def shell(self, command: str, *, seconds: float | None = None) -> Ran:
        """See `Sandbox`."""
        if "\0" in command:
            return Ran(code=2, stderr="a shell command cannot hold a NUL character\n")
        return self._cell("shell", command, seconds)[1]

    def put(self, path: str, content: bytes) -> None:
        """See `Sandbox`."""
        if len(content) > self._files_mb << 20:
            raise OSError(f"{path}: {len(content)} bytes; the sandbox has room for {self._files_mb} MiB")
        self._file(path, base64.b64encode(content).decode())

    def get(self, path: str) -> bytes:
        """See `Sandbox`."""
        try:
            return base64.b64decode(str(self._file(path, None).get("content", "")), validate=True)
        except ValueError as error:
            raise OSError(f"{path}: {error}") from error

    def close(self) -> None:
        """See `Sandbox`."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()
            try:
                process.wait(timeout=_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.close()

    def __enter__(self) -> ConfinedSandbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def _cell(self, kind: str, text: str, seconds: float | None) -> tuple[dict[str, Any], Ran]:
        if len(text) > _MOST_CELL:
            return {}, Ran(code=2, stderr=f"the cell has {len(text)} characters; at most {_MOST_CELL} are run\n")
        limit = self._seconds if seconds is None else seconds
        _check_numbers(seconds=limit)
        said = self._exchange({"kind": kind, "text": text, "seconds": limit}, limit + _GRACE_S)
        if "refused" in said:
            raise SandboxError(str(said["refused"]))
        names = ("code", "stdout", "stderr", "cut", "timed_out", "ended")
        found = Ran(**{name: said[name] for name in names})
        return said, found

    def _file(self, path: str, content: str | None) -> dict[str, Any]:
        text = json.dumps({"path": path, "content": content, "most": self._files_mb << 20})
        said = self._exchange({"kind": "files", "text": text, "seconds": _FILE_S}, _FILE_S + _GRACE_S)
        why = said.get("error") or said.get("ended")
        if why:
            raise OSError(f"{path}: {why}")
        return said

    def _exchange(self, asked: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Sends a line to the keeper, and reads its answer.

        Raises:
            SandboxError: the keeper has ended, or does not answer.
        """
        with self._lock:
            process = self._process
            if process is None or process.stdin is None or process.stdout is None:
                raise SandboxError("the sandbox is closed")
            try:
                process.stdin.write(json.dumps(asked).encode() + b"\n")
                process.stdin.flush()
                line = _line(process.stdout, time.monotonic() + seconds)
            except OSError as error:
                raise SandboxError(f"the sandbox is lost: {error}") from error
        if line is None:
            raise SandboxError("the sandbox has ended: its keeper was killed, or its `life_s` is over")
        said: dict[str, Any] = json.loads(line)
        return said


def _start(folder: str, *, packages: bool) -> subprocess.Popen[bytes]:
    flags = ["-I", "-B"] if packages else ["-I", "-S", "-B"]
    variables = {"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "PYTHONHASHSEED": "0", "LANG": "C.UTF-8",
                 "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # fmt: skip
    return subprocess.Popen(
        [sys.executable, *flags, str(_KEEPER)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=folder, env=variables,
        start_new_session=True, bufsize=0,
    )  # fmt: skip


def _line(stream: IO[bytes], deadline: float) -> bytes | None:
    """The next line; None: there is none any more. Raises TimeoutError, which is an OSError."""
    parts: list[bytes] = []
    while True:
        if not _is_ready(stream.fileno(), deadline):
            raise TimeoutError("no answer")
        data = os.read(stream.fileno(), 1 << 20)
        if not data:
            return None
        parts.append(data)
        if data.endswith(b"\n"):
            return b"".join(parts)


def _is_ready(fd: int, deadline: float) -> bool:
    poll = select.poll()  # file descriptors beyond 1,024, too
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))


def _check_confined(said: dict[str, Any], missing: Sequence[str]) -> None:
    if "refused" in said:
        raise SandboxError(f"no sandbox could be started: {said['refused']}")
    lacking = [what for what in missing if what.startswith(ESSENTIAL)]
    if lacking:
        raise SandboxError(
            f"this system cannot confine what a model runs: {'; '.join(lacking)}. Use a kernel with Landlock and "
            "seccomp (Linux 5.13 or newer), or a sandbox of a plugin: rlsdk plugins list"
        )


def _check_numbers(**values: float) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConfigError(f"sandbox: {name} is {value!r}; expected a number above 0")


def _check_lists(read: Sequence[str], ports: Sequence[int]) -> None:
    if isinstance(read, str) or any(not isinstance(path, str) or not os.path.isabs(path) for path in read):
        raise ConfigError(f"sandbox: read is {read!r}; expected a list of absolute paths, such as ['/data/books']")
    if any(isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65_536 for port in ports):
        raise ConfigError(f"sandbox: ports is {ports!r}; expected a list of TCP ports, such as [443]")
