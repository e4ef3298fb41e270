"""A rank of another role, callable from inside a worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlsdk.cluster.calls.messages import Call, Failure
from rlsdk.cluster.workers.worker import local_host
from rlsdk.interfaces import DeadlineError, WorkerError
from rlsdk.kit.ranks.progress import advance


@dataclass(frozen=True, kw_only=True)
class WorkerPeer:
    """Satisfies `rlsdk.interfaces.Peer`."""

    actor: Any
    worker_id: str
    role: str
    rank: int
    where: str
    """Node and process, for messages."""

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Runs a concurrent method of that rank and waits for its result.

        Raises:
            DeadlineError: no answer within `timeout_s`.
            WorkerError: the process died, or the method raised an error that is not one of rlsdk's.
        """
        import ray

        who = f"{self.role} rank {self.rank} on {self.where}"
        call = Call(role=self.role, method=method, args=args, kwargs={})
        try:
            result = ray.get(self.actor.call.remote(None, call), timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise DeadlineError(f"{who} did not answer {method!r} within {timeout_s:g} s") from error
        except ray.exceptions.RayError as error:
            raise WorkerError(f"{who} could not answer {method!r}: {error}") from error
        if isinstance(result, Failure):
            raise result.to_error(f"{self.role}.{method} on {who}")
        advance()
        return result

    def local(self) -> Any | None:
        """The host itself when it lives in the calling process, else None."""
        return local_host(self.worker_id, self.role)
