"""Waits for ranks, with a deadline, and no longer than until the first one fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlsdk.cluster.calls.handle import WorkerHandle, first_dead, shortest_idle
from rlsdk.cluster.calls.messages import Failure
from rlsdk.cluster.calls.relay import Gone
from rlsdk.cluster.ray_cluster.daemons import check_daemons
from rlsdk.interfaces import DeadlineError, WorkerError

_LOOK_ROUND_S = 0.5
"""Seconds between checks of a long wait: which ranks have answered, and whether any other worker has died."""
_FIRST_LOOK_S = 0.02
"""Seconds until the first check of a wait, doubled each time, so that an early failure is noticed soon."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A running call on one rank."""

    ref: Any
    worker: WorkerHandle
    role: str
    rank: int
    relayed: tuple[Request, ...] = ()
    """Requests whose answers arrive with this one, itself included (`rlsdk.cluster.calls.relay`)."""

    @property
    def each(self) -> tuple[Request, ...]:
        """The requests to all ranks that were called."""
        return self.relayed or (self,)

    def who(self) -> str:
        return f"{self.role} rank {self.rank}"


def answer(request: Request, doing: str, get: Callable[[], Any]) -> Any:
    """Returns a rank's answer.

    Raises:
        WorkerError: it died, or raised an error that is not one of rlsdk's.
        RlsdkError: the error that it raised.
    """
    import ray

    try:
        found = get()
    except ray.exceptions.RayActorError as error:
        raise request.worker.gone(request.who(), doing, error) from None
    except ray.exceptions.RayError as error:
        raise WorkerError(f"{request.who()} on {request.worker.where()} failed {doing}: {error}") from error
    return checked(request, doing, found)


def checked(request: Request, doing: str, found: Any) -> Any:
    """An answer that is none raises, as `answer` does."""
    if isinstance(found, Gone):
        raise request.worker.gone(request.who(), doing, request.worker.death() or WorkerError("its process ended"))
    if isinstance(found, Failure):
        raise found.to_error(f"{request.who()} on {request.worker.where()}, {doing}")
    return found


class Pending:
    """The result of a call that may still be running."""

    def __init__(
        self,
        requests: Sequence[Request],
        *,
        doing: str,
        join: Callable[[Mapping[int, Any]], Any],
        timeout_s: float,
        bystanders: Sequence[Request] = (),
        first_done: bool = False,
    ) -> None:
        """`join` makes the result from the answers by rank; `bystanders` are ranks whose death ends the wait too."""
        self._requests = requests
        self._doing = doing
        self._join = join
        self._timeout_s = timeout_s
        self._bystanders = bystanders
        self._first_done = first_done
        self._outcome: tuple[Any, BaseException | None] | None = None

    def done(self) -> bool:
        """True when `result` would not wait. Does not block."""
        import ray

        if self._outcome is not None:
            return True
        needed = 1 if self._first_done else len(self._requests)
        ready, _ = ray.wait([r.ref for r in self._requests], num_returns=needed, timeout=0)
        return len(ready) >= needed

    def result(self, timeout_s: float | None = None) -> Any:
        """Waits for every rank that was called (or the first, as the method declares) and joins the answers.

        Args:
            timeout_s: seconds without an answer and without progress of any rank that has not answered; None: those
                of the group.

        Raises:
            DeadlineError: some rank did not answer, and none that is waited for makes progress; may be called again.
            WorkerError: a rank died, or raised what is not one of rlsdk's errors. Others are not waited for.
            RlsdkError: what a rank raised, with a note that says where.
        """
        if self._outcome is None:
            try:
                self._outcome = self._join(self._collect(timeout_s or self._timeout_s)), None
            except DeadlineError:
                raise
            except Exception as error:
                self._outcome = None, error
            # References are dropped at once, to free their results in the object store.
            self._requests = ()
        value, failure = self._outcome
        if failure is not None:
            raise failure
        return value

    def _collect(self, timeout_s: float) -> dict[int, Any]:
        """Polls all open requests a few times a second, not once per answer: a thousand ranks that answer one by one
        cost a thousand reads, not a million."""
        import ray

        deadline = time.monotonic() + timeout_s
        waiting = {request.ref: request for request in self._requests}
        answers: dict[int, Any] = {}
        patience_s, looked = _FIRST_LOOK_S, time.monotonic()
        while waiting and not (self._first_done and answers):
            check_daemons()
            left = deadline - time.monotonic()
            if left <= 0:
                silent = [one for request in waiting.values() for one in request.each]
                idle_s = shortest_idle([request.worker for request in silent])
                if idle_s is None or idle_s >= timeout_s:
                    raise self._too_late(silent, timeout_s)
                deadline = time.monotonic() + timeout_s - idle_s
                continue
            needed = 1 if self._first_done else len(waiting)
            ready, _ = ray.wait(list(waiting), num_returns=needed, timeout=min(left, patience_s))
            answers |= self._read([waiting.pop(ref) for ref in ready])
            patience_s = min(2 * patience_s, _LOOK_ROUND_S)
            if waiting and time.monotonic() - looked > _LOOK_ROUND_S:
                self._look_round()
                looked = time.monotonic()
        return answers

    def _read(self, requests: Sequence[Request]) -> dict[int, Any]:
        """Reads finished answers by rank: all at once, or one by one if that is needed to tell whose error it is."""
        import ray

        check_daemons()
        try:
            found = ray.get([request.ref for request in requests])
        except ray.exceptions.RayError:
            found = [self._answer(request) for request in requests]
        answers = {
            one.rank: (one, own)
            for request, value in zip(requests, found, strict=True)
            for one, own in zip(request.each, value if request.relayed else [value], strict=True)
        }
        # Dead ranks first: others fail because of them.
        for kind in (Gone, Failure):
            for one, own in answers.values():
                if isinstance(own, kind):
                    checked(one, self._doing, own)
        return {rank: own for rank, (_, own) in answers.items()}

    def _answer(self, request: Request) -> Any:
        import ray

        return answer(request, self._doing, lambda: ray.get(request.ref))

    def _look_round(self) -> None:
        """Raises if a rank has died for which the others may be waiting in a collective."""
        if (at := first_dead([request.worker for request in self._bystanders])) is not None:
            request = self._bystanders[at]
            reason = request.worker.death()
            assert reason is not None
            raise request.worker.gone(request.who(), self._doing, reason)

    def _too_late(self, silent: Sequence[Request], timeout_s: float) -> DeadlineError:
        """Of ranks whose answers come together all are silent while one is."""
        asked = sum(len(request.each) for request in self._requests)
        roles = ", ".join(f"{request.who()} ({request.worker.where()})" for request in silent[:8])
        more = f" and {len(silent) - 8} more" if len(silent) > 8 else ""
        logs = [path for request in silent[:1] if request.worker.info for path in request.worker.info.logs]
        return DeadlineError(
            f"no answer within {timeout_s:g} s {self._doing} from {roles}{more}, and no progress; of "
            f"{asked} calls {asked - len(silent)} were answered. Look at "
            f"{', '.join(logs) or 'the workers'}, or raise the deadline of this phase (deadlines.*) if one piece of "
            "the work takes that long"
        )


def wait_any(pending: Sequence[Pending], timeout_s: float) -> Pending:
    """The first of several calls that is done.

    Raises:
        DeadlineError: none was done in time.
    """
    import ray

    deadline = time.monotonic() + timeout_s
    while True:
        check_daemons()
        for item in pending:
            if item.done():
                return item
        left = deadline - time.monotonic()
        if left <= 0:
            raise DeadlineError(f"none of {len(pending)} calls was done within {timeout_s:g} s")
        refs = [request.ref for item in pending for request in item._requests]
        _, open_refs = ray.wait(refs, num_returns=len(refs), timeout=0)
        ray.wait(open_refs, num_returns=1, timeout=min(left, _LOOK_ROUND_S))
