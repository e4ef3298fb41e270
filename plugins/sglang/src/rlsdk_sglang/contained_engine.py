"""SGLang's engine, contained: it can neither end nor disturb the process that it runs in.

SGLang treats that process as its own: it kills the process and all its children if a scheduler or SGLang's receiving
loop fails, kills all children when the process exits, and never closes its sockets and files. Here failures are
recorded and raised by the next call, and `end` ends only SGLang's own processes, sockets and files.

Tested: 0.5.23.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from typing import Any

import psutil

from rlsdk.interfaces import RlsdkError
from rlsdk_sglang import scheduler_process
from rlsdk_sglang.named_resources import NamedResources

LEAVE_S = 10.0
"""Seconds for schedulers to end before they are killed."""
KILL_S = 20.0
"""Seconds for killed processes to end."""
logger = logging.getLogger("rlsdk_sglang")


class ContainedEngine:
    """All processes and resources of an SGLang engine, also of a start that failed half-way.

    Start and end it on one thread, which must live as long as the schedulers: they end with this thread.
    """

    def __init__(self) -> None:
        self.named_resources = NamedResources()
        self.processes: list[BaseProcess] = []
        """The schedulers."""
        self.front: Any = None
        """SGLang's `TokenizerManager`, which handles samples and updates."""
        self.failure: Exception | None = None
        """Error that ended the loop that receives SGLang's answers."""
        self._engine: Any = None
        self._seen: list[psutil.Process] = []
        """The schedulers as psutil processes: these checks work whichever code reaps ended children."""

    def start(self, arguments: dict[str, Any]) -> None:
        """Starts the engine. Raises what SGLang raises; call `end` then too."""
        engine = _engine_class(self)
        self._engine = engine.__new__(engine)
        self._engine.__init__(**arguments)

    def watch(self, processes: Sequence[BaseProcess]) -> None:
        """Registers processes that were just started."""
        self.processes = list(processes)
        self.named_resources.note([process.pid for process in processes if process.pid is not None])
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                self._seen.append(psutil.Process(process.pid))

    def check_alive(self) -> None:
        """Raises `RlsdkError` if a scheduler or the receiving loop ended."""
        for process in self._seen:
            if _has_ended(process):
                raise RlsdkError(
                    f"a scheduler of SGLang (process {process.pid}) ended; see its last messages in the log of the "
                    "worker that started it. Start the run again, or give rollout.sglang.log_level 'info' for more "
                    "messages"
                )
        if self.failure is not None:
            raise RlsdkError(f"the loop that receives SGLang's answers failed: {self.failure!r}. Start the run again")

    def kill(self) -> None:
        """Kills the schedulers, so that a start that waits for them fails. Thread-safe; `end` must still be called."""
        for process in self.processes:
            process.kill()

    def end(self, leave_s: float = 0.0) -> None:
        """Ends its processes, sockets and files. May be called twice.

        Args:
            leave_s: seconds to wait for schedulers that another process asks to end: the first node of a replica ends
                the schedulers of all nodes.
        """
        if self._engine is not None:
            atexit.unregister(self._engine.shutdown)
        family = [member for process in self.processes for member in _below(process)]
        if self.front is not None and self.processes:
            self._dismiss()
        deadline = time.monotonic() + leave_s
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0.0))
            process.kill()
            process.join(KILL_S)
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family, timeout=KILL_S)
        self._close()
        self.named_resources.clear()

    def _dismiss(self) -> None:
        """Asks schedulers to end, so that they free what a killed process would leak: device memory, semaphores,
        shared memory."""
        from sglang.srt.managers.io_struct import ShutdownReq

        deadline = time.monotonic() + LEAVE_S
        while time.monotonic() < deadline and any(process.is_alive() for process in self.processes):
            try:
                # Repeat the request: a sleeping scheduler wakes for a message, and then sleeps for another second.
                self.front._dispatch_to_scheduler(ShutdownReq())
            except Exception as error:
                logger.warning("SGLang's schedulers could not be asked to end, and are killed: %r", error)
                return
            for process in self.processes:
                process.join(0.1)

    def _close(self) -> None:
        """Destroys the sockets with their contexts: each context has its own threads."""
        sockets = [getattr(self._engine, "send_to_rpc", None)]
        if self.front is not None:
            sockets += [self.front.recv_from_detokenizer, self.front.send_to_scheduler]
            # Sockets report cancelled operations to the loop, but nothing waits for these any more.
            asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        for socket in sockets:
            if socket is not None:
                socket.context.destroy(linger=0)
        self.front = self._engine = None
        self.processes = []


def _engine_class(owner: ContainedEngine) -> Any:
    """SGLang's engine class with this plugin's schedulers, and without code that ends or watches processes."""
    from sglang.srt.entrypoints.engine import Engine, init_tokenizer_manager
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    class QuietFront(TokenizerManager):  # type: ignore[misc]
        async def handle_loop(self) -> None:
            try:
                await super().handle_loop()
            except Exception as error:
                # SGLang would kill this process here.
                logger.exception("the loop that receives SGLang's answers failed")
                owner.failure = error

        async def sigterm_watchdog(self) -> None:
            """Disabled: the process handles signals, not its engine."""

        def init_ipc_channels(self, ports: Any) -> None:
            super().init_ipc_channels(ports)
            owner.front = self

    class QuietEngine(Engine):  # type: ignore[misc]
        run_scheduler_process_func = staticmethod(scheduler_process.run_scheduler)

        @staticmethod
        def init_tokenizer_manager_func(server_args: Any, ports: Any) -> Any:
            return init_tokenizer_manager(server_args, ports, QuietFront)

        @classmethod
        def _launch_scheduler_processes(cls, server_args: Any, ports: Any, *args: Any, **kwargs: Any) -> Any:
            owner.named_resources.take(ports)
            result, processes = super()._launch_scheduler_processes(server_args, ports, *args, **kwargs)
            owner.watch(processes)
            # None: no watchdog. SGLang's own would end this process when a scheduler ends.
            return result, None

        @classmethod
        def _launch_detokenizer_subprocesses(cls, **_: Any) -> tuple[Sequence[Any], Sequence[str]]:
            """Not started: no text is decoded."""
            return [], []

        def shutdown(self) -> None:
            """Disabled. SGLang calls it when the interpreter exits; its own version ends all children of this
            process."""

    return QuietEngine


def _has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _below(process: BaseProcess) -> list[psutil.Process]:
    """All descendants of a process."""
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
