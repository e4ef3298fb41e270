"""The controller's end of one worker: sends calls in order and explains why a worker died."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from rlsdk.cluster.calls.messages import Call, CreateHost
from rlsdk.cluster.calls.worker_logs import last_lines
from rlsdk.cluster.devices.worker_info import WorkerInfo
from rlsdk.interfaces import WorkerError

_IDLE_ANSWER_S = 5.0
"""Seconds for a process to answer whether it makes progress."""


class WorkerHandle:
    """One `DeviceWorker` actor, seen from the controller. Calls are numbered here, so their order is the worker's."""

    def __init__(self, actor: Any, worker_id: str, pool: str, device: int) -> None:
        self.actor = actor
        self.worker_id = worker_id
        self.pool = pool
        self.device = device
        self.info: WorkerInfo | None = None
        self._live = actor.live.remote()
        # Number 0 is the worker's own: importing what it was told to preload.
        self._sequence = 1
        self.ordering = threading.RLock()
        """Held while a call is numbered and sent."""

    def call(self, call: Call, *, concurrent: bool) -> Any:
        """Sends a call; returns the reference of its result."""
        if concurrent:
            return self.actor.call.remote(None, call)
        return self._in_order(lambda sequence: self.actor.call.remote(sequence, call))

    def create(self, request: CreateHost) -> Any:
        return self._in_order(lambda sequence: self.actor.create.remote(sequence, request))

    def close(self) -> Any:
        return self._in_order(self.actor.close.remote)

    def _in_order(self, send: Callable[[int], Any]) -> Any:
        # A number is used up only when the call went out: a gap would stop the engine thread for good.
        with self.ordering:
            ref = send(self._sequence)
            self._sequence += 1
        return ref

    def take_number(self) -> int:
        """Takes the number of a call that is sent together with other workers' calls. The caller holds `ordering`."""
        self._sequence += 1
        return self._sequence - 1

    def give_number_back(self) -> None:
        """Returns the number of a call that was not sent. The caller has held `ordering` since `take_number`."""
        self._sequence -= 1

    def death(self) -> BaseException | None:
        """Ray's reason if the process is dead, else None. Does not block."""
        import ray

        ready, _ = ray.wait([self._live], timeout=0)
        if not ready:
            return None
        try:
            ray.get(self._live)
        except Exception as error:
            return error
        return None

    def kill(self) -> None:
        import ray

        ray.kill(self.actor, no_restart=True)

    def end(self, timeout_s: float) -> None:
        """Kills the process and waits until it is gone, so that its device is free for the next one.

        Raises:
            WorkerError: it is still running.
        """
        import ray

        self.kill()
        if ray.wait([self._live], timeout=timeout_s / 2)[0]:
            return
        if self.info is not None and self.info.node_id == ray.get_runtime_context().get_node_id():
            with suppress(ProcessLookupError):  # one that was stopped does not hear Ray
                os.kill(self.info.pid, signal.SIGKILL)
        if not ray.wait([self._live], timeout=timeout_s / 2)[0]:
            raise WorkerError(f"the process on {self.where()} could not be ended within {timeout_s:g} s")

    def known(self) -> WorkerInfo:
        """Node and process of the worker.

        Raises:
            WorkerError: it has not answered yet.
        """
        if self.info is None:
            raise WorkerError(f"the worker of {self.where()} was not waited for")
        return self.info

    def where(self) -> str:
        """Node and process, for messages."""
        if self.info is None:
            return f"pool {self.pool!r} device {self.device}, before it was ready"
        return f"node {self.info.node}, pid {self.info.pid}"

    def gone(self, who: str, doing: str, reason: BaseException) -> WorkerError:
        """Error for a dead process: who, where, why, and its last output."""
        text = f"{who} died on {self.where()} while {doing}: {_first_line(reason)}"
        if self.info is None:
            return WorkerError(text)
        return WorkerError(f"{text}\nlast lines of {', '.join(self.info.logs)}:\n{last_lines(self.info)}")


def first_dead(workers: Sequence[WorkerHandle]) -> int | None:
    """Index of the first worker that Ray reports dead, in one query for all; None: all live. Does not block."""
    import ray

    refs = [worker._live for worker in workers]
    dead, _ = ray.wait(list(dict.fromkeys(refs)), num_returns=1, timeout=0) if refs else ([], [])
    return refs.index(dead[0]) if dead else None


def shortest_idle(workers: Sequence[WorkerHandle]) -> float | None:
    """Seconds since the most recent progress of any of them; None if none answers."""
    import ray

    refs = [worker.actor.idle_s.remote() for worker in dict.fromkeys(workers)]
    answered, _ = ray.wait(refs, num_returns=len(refs), timeout=_IDLE_ANSWER_S)
    found: list[float] = []
    for ref in answered:
        with suppress(ray.exceptions.RayError):
            found.append(ray.get(ref))
    return min(found, default=None)


def _first_line(error: BaseException) -> str:
    """Ray's reason without its advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "because" in line or "exit" in line.lower()]
    return (telling or lines or [type(error).__name__])[0]
