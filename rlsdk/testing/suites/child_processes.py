"""Child pytest processes that end when the program that started them ends, even by kill -9.

Each child reads from a pipe whose other end the kernel closes when the program ends. The child then gets SIGINT, so
that suites close their engines, and is killed if it still runs after `GRACE_S`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

OPTION = "--rlsdk-parent-pipe"
"""Option that this package adds to pytest: file descriptor of the pipe's reading end."""
GRACE_S = 30.0
"""Seconds for suites to end the processes that they started."""


def run_child(command: Sequence[str], cwd: Path, output: IO[str] | None) -> int:
    """Runs one process, as `run_children`."""
    return run_children([command], cwd, [output])[0]


def run_children(
    commands: Sequence[Sequence[str]],
    cwd: Path,
    outputs: Sequence[IO[str] | None],
    environment: Mapping[str, str] | None = None,
) -> list[int]:
    """Runs several pytest processes concurrently until they end. They end early if this process ends or an exception
    is raised here.

    Args:
        commands: commands of the pytest processes.
        cwd: their working directory.
        outputs: for each, the file that receives its output; None: this process's own streams.
        environment: the environment of each; None: this process's own.

    Returns: their exit codes.
    """
    reading, writing = os.pipe()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        try:
            for command, output in zip(commands, outputs, strict=True):
                process = subprocess.Popen(
                    [*command, OPTION, str(reading)], cwd=cwd, env=environment, stdout=output, stderr=output,
                    pass_fds=[reading],
                    # Ctrl-C arrives by the pipe: a second one would interrupt the suites' cleanup.
                    start_new_session=True,
                )  # fmt: skip
                processes.append(process)
        finally:
            os.close(reading)
        return [process.wait() for process in processes]
    finally:
        os.close(writing)
        for process in processes:
            process.wait()


def die_with_parent(reading: int) -> None:
    """Ends this process when the other end of the pipe closes. Call it on the main thread."""
    os.set_inheritable(reading, False)
    # Processes that a shell starts in the background ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def watch() -> None:
        os.read(reading, 1)
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(GRACE_S)
        _kill_all()

    threading.Thread(target=watch, name="rlsdk-parent-pipe", daemon=True).start()


def _kill_all() -> None:
    """Kills the processes that this process started, then itself."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            child.kill()
    os.kill(os.getpid(), signal.SIGKILL)
