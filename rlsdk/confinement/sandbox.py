"""Runs a program that a model wrote in its own confined process, with limits; kills it with all its descendants."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rlsdk.confinement import sandbox_child
from rlsdk.system.temporary import held_folder

_CHILD = Path(sandbox_child.__file__)
_MAX_READ = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Resource limits of a program."""

    seconds: float
    """Wall-clock seconds for all tests of a program."""
    memory_mb: int
    """MiB of address space."""
    packages: bool = False
    """Whether it may import installed packages; the standard library is always available."""
    confined: bool = True
    """Whether it has no network, and can write only to an empty folder in memory."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one process."""

    exit_code: int
    """Exit code; negative: the number of the signal that killed it, also -9 after a timeout."""
    output: str
    """Its standard output."""
    results: Sequence[dict[str, Any]]
    """A record for each test."""


def run_io(program: str, text: str, limits: Limits, seconds: float) -> Outcome:
    """Runs a program with an input, for at most `seconds`."""
    return _run({"mode": "io", "program": program}, text, limits, seconds)


def run_tests(program: str, setup: str, tests: Sequence[tuple[str, str]], nonce: str, limits: Limits) -> Outcome:
    """Loads a program and runs tests in its process, each ("value", expression) or ("test", statements)."""
    job = {"mode": "tests", "program": program, "setup": setup, "tests": list(tests), "nonce": nonce}
    return _run(job, "", limits, limits.seconds)


def _run(job: dict[str, Any], text: str, limits: Limits, seconds: float) -> Outcome:
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(held_folder("code"))
        job_file, result, stdin, stdout = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(4))
        job = {**job, "folder": folder, "seconds": seconds, "memory_mb": limits.memory_mb, "confined": limits.confined}
        _fill(job_file, json.dumps(job))
        _fill(stdin, text)
        fds = (job_file.fileno(), result.fileno())
        flags = ["-I"] if limits.packages else ["-I", "-S"]
        command = [sys.executable, *flags, "-B", str(_CHILD), *map(str, fds)]
        process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.DEVNULL,
            pass_fds=fds,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "PYTHONHASHSEED": "0", "LANG": "C.UTF-8"},
            start_new_session=True,
        )
        try:
            _wait(process, time.monotonic() + seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            exit_code = process.wait()
        return Outcome(exit_code=exit_code, output=_text(stdout), results=_records(_text(result)))


def _wait(process: subprocess.Popen[bytes], deadline: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=max(0.0, deadline - time.monotonic()))


def _fill(stream: IO[bytes], text: str) -> None:
    stream.write(text.encode("utf-8", errors="surrogatepass"))
    stream.flush()
    stream.seek(0)


def _text(stream: IO[bytes]) -> str:
    stream.seek(0)
    return stream.read(_MAX_READ).decode("utf-8", errors="replace")


def _records(text: str) -> list[dict[str, Any]]:
    """Returns the valid records. The program runs in the process that writes them, so lines may contain anything."""
    records = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict):
                records.append(record)
    return records
