"""Child pytest processes that end when the program that started them ends, even by kill -9.

Each child reads from a pipe whose other end the kernel closes with the program. The child then gets SIGINT, so that
suites close their engines, and is killed if it still runs after `GRACE_S`.
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
"""Of pytest, by this package's plugin: the number of the pipe's reading end."""
GRACE_S = 30.0
"""For suites to end what they started."""


def run_child(command: Sequence[str], cwd: Path, output: IO[str] | None) -> int:
    """As `run_children`, for one process."""
    return run_children([command], cwd, [output])[0]


def run_children(
    commands: Sequence[Sequence[str]],
    cwd: Path,
    outputs: Sequence[IO[str] | None],
    environment: Mapping[str, str] | None = None,
) -> list[int]:
    """Runs several pytest processes at once to their end; they end early with this process, and with whatever is
    raised here meanwhile.

    Args:
        commands: of pytest.
        cwd: where they run.
        outputs: for each, what takes what it prints; None leaves that to this process's own streams.
        environment: of each; None: this process's own.

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
                    # Ctrl-C comes by the pipe: a second one would end suites in their own clearing up.
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
    """Has this process end when the pipe's other end closes. From its main thread."""
    os.set_inheritable(reading, False)
    # Shells have what they start in the background ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def watch() -> None:
        os.read(reading, 1)
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(GRACE_S)
        _kill_all()

    threading.Thread(target=watch, name="rlsdk-parent-pipe", daemon=True).start()


def _kill_all() -> None:
    """This process, after what it started."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            child.kill()
    os.kill(os.getpid(), signal.SIGKILL)
