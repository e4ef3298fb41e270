"""Processes of vLLM's that end in time: with the process that started them, and when a start takes too long.

A core would wait for its messages for ever, with the memory that it holds. A worker of tensor parallelism notices that
the process above it is gone, and ends between two passes; but on a CPU one that is in the middle of a sum with a worker
that has ended goes on waiting for it, with all of a processor.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rlsdk.interfaces import DeadlineError
from rlsdk_vllm.patching import patched

PR_SET_PDEATHSIG = 1
"""Of prctl(2): the signal that a process gets when the thread that started it ends."""
NAMES = ("EngineCore", "VllmWorker")
"""How vLLM's processes are called."""
POLL_S = 0.2
"""Between two looks for processes whose start has taken too long."""


class EndsWithParent:
    """vLLM's main function of a core's process, after a promise that the kernel keeps: killed with the parent.

    It is called in a new process. One that is spawned gets it by pickle, and looks the function up there.
    """

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        end_with_parent()
        from rlsdk_vllm import unnamed_memory

        unnamed_memory.install()
        self._run(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return _found_here, ()


def _found_here() -> EndsWithParent:
    from vllm.v1.engine.core import EngineCoreProc

    return EndsWithParent(EngineCoreProc.run_engine_core)


def end_with_parent() -> None:
    """Asks the kernel to kill this process when the thread that started it ends; Linux only."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parent = multiprocessing.parent_process()
    # It may have ended before the kernel was asked.
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)


def watch_parent() -> None:
    """Kills this Python process when its parent has ended, whatever it computes."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="rlsdk-vllm-parent", daemon=True).start()


@contextmanager
def cores_end_with_this_thread() -> Iterator[None]:
    """Of cores that are started inside, by a thread that lives as long as they should."""
    from vllm.v1.engine.core import EngineCoreProc

    with patched("run_engine_core", _found_here(), EngineCoreProc):
        yield


@contextmanager
def started_within(timeout_s: float, check: Callable[[], None] = lambda: None) -> Iterator[None]:
    """vLLM waits for its processes to start as long as they live. Here they are killed when it takes too long, or when
    others that they wait for could not start.

    Args:
        timeout_s: for the start.
        check: raises where those others could not.

    Raises: DeadlineError: it took longer.
    """
    others = set(multiprocessing.active_children())
    started, killed = threading.Event(), threading.Event()

    def comes() -> bool:
        """Waits; False when it is time to kill."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if started.wait(POLL_S):
                return True
            try:
                check()
            except Exception:
                return False
        return False

    def watch() -> None:
        ended = comes()
        # Some may only come now.
        while not ended:
            for process in set(multiprocessing.active_children()) - others:
                if process.name.startswith(NAMES):
                    killed.set()
                    process.kill()
            ended = started.wait(POLL_S)

    threading.Thread(target=watch, name="rlsdk-vllm-start", daemon=True).start()
    try:
        yield
    except Exception as error:
        if killed.is_set():
            raise DeadlineError(
                f"vLLM's processes did not start within {timeout_s:g} s and were killed. Give a larger "
                "deadlines.collective_s, or look for the cause with rollout.vllm.log_level INFO"
            ) from error
        raise
    finally:
        started.set()
