"""Lifetime of vLLM's processes: they end with the process that started them, or if their start takes too long.

Otherwise a core would wait for messages forever and keep its memory. A tensor-parallel worker notices that its parent
is gone, and ends between two passes; but on a CPU a worker that reduces with an ended worker waits forever, and keeps a
core busy.
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
"""Option of prctl(2): the signal that a process gets when the thread that started it ends."""
NAMES = ("EngineCore", "VllmWorker")
"""Names of vLLM's processes."""
POLL_S = 0.2
"""Seconds between checks for processes whose start takes too long."""


class EndsWithParent:
    """Main function of a core's process: asks the kernel to kill the process with its parent, then runs vLLM's own.

    It is called in a new process. A spawned process receives it by pickle, and looks up vLLM's function itself.
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
    # The parent may have ended before the call.
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
    """Cores that are started in this context end with its thread."""
    from vllm.v1.engine.core import EngineCoreProc

    with patched("run_engine_core", _found_here(), EngineCoreProc):
        yield


@contextmanager
def started_within(timeout_s: float, check: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Limits the start of vLLM's processes, for which vLLM waits without limit: they are killed when it takes too long,
    or when others that they wait for could not start.

    Args:
        timeout_s: for the start.
        check: raises if those others could not start.

    Raises: DeadlineError: it took longer.
    """
    others = set(multiprocessing.active_children())
    started, killed = threading.Event(), threading.Event()

    def comes() -> bool:
        """Waits for the start to end; returns False if the processes must be killed."""
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
        # Some processes may appear only now.
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
