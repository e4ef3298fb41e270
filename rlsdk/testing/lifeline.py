"""A pytest process that ends with the program that started it, however that ends: kill -9 included.

A pipe joins them, whose one end the kernel closes with the program. The process is then interrupted as by Ctrl-C, so
that suites end their engines; what is left after a while is killed.
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

OPTION = "--rlsdk-lifeline"
"""Of pytest, by this package's plugin: the number of the pipe's reading end."""
GRACE_S = 30.0
"""For suites to end what they started."""


def run_tied(command: Sequence[str], cwd: Path, output: IO[str] | None) -> int:
    """As `run_all_tied`, for one process."""
    return run_all_tied([command], cwd, [output])[0]


def run_all_tied(
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


def tie(reading: int) -> None:
    """Has this process end when the pipe's other end closes. From its main thread."""
    os.set_inheritable(reading, False)
    # Shells have what they start in the background ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def watch() -> None:
        os.read(reading, 1)
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(GRACE_S)
        _kill_all()

    threading.Thread(target=watch, name="rlsdk-lifeline", daemon=True).start()


def _kill_all() -> None:
    """This process, after what it started."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            child.kill()
    os.kill(os.getpid(), signal.SIGKILL)
