"""Requests in flight: which are waiting, which samples each must still return, and how it is sent again."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from rlsdk.interfaces import GenerationOutput, GenerationRequest, RlsdkError, WorkerError

SampleSeed = tuple[int | None, int]
"""Seed of a request and index of a sample, which together determine the sample's tokens."""
Kept = tuple[GenerationRequest, GenerationOutput]
"""Request and partial output of an unfinished sample."""


class Waiter(Protocol):
    """Waits for one sample: an `asyncio.Future` or a `Receiver`."""

    def done(self) -> bool: ...

    def set_result(self, result: GenerationOutput, /) -> None: ...

    def set_exception(self, exception: BaseException, /) -> None: ...

    def exception(self) -> BaseException | None: ...

    def cancel(self) -> Any: ...


class Receiver:
    """Delivers a sample as it arrives, within the same turn of the loop. A small model ends hundreds of samples in one
    decoding step, and a future for each would cost more than all other work on them."""

    __slots__ = ("_is_done", "_take")

    def __init__(self, take: Callable[[GenerationOutput | BaseException], None]) -> None:
        """`take` is called once, unless the request is cancelled; it must not raise."""
        self._take = take
        self._is_done = False

    def done(self) -> bool:
        return self._is_done

    def set_result(self, result: GenerationOutput, /) -> None:
        self._is_done = True
        self._take(result)

    def set_exception(self, exception: BaseException, /) -> None:
        self._is_done = True
        self._take(exception)

    def exception(self) -> BaseException | None:
        """Always None: the error was delivered."""
        return None

    def cancel(self) -> None:
        self._is_done = True


@dataclass(eq=False)
class Flight:
    """A request in flight."""

    request: GenerationRequest
    priority: int
    samples: dict[int, Waiter]
    """Waiters of unfinished samples, by sample index."""
    replica: int | None = None
    attempts: int = 0
    partial: dict[int, GenerationOutput] = field(default_factory=dict)
    """By sample index: partial output from before an interruption, which the request repeats as `response_ids`."""

    @property
    def tokens(self) -> int:
        """Upper bound on the tokens that it may still need."""
        request = self.request
        return len(request.prompt_ids) + len(self.samples) * (request.sampling.max_tokens - len(request.response_ids))


def reissued(flight: Flight) -> list[Flight]:
    """New requests with new ids, one for each run of adjacent samples that are still missing."""
    runs: list[list[int]] = []
    for index in sorted(flight.samples):
        if runs and runs[-1][-1] == index - 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    name = flight.request.request_id.partition("~")[0]
    return [
        Flight(
            replace(flight.request, request_id=f"{name}~{flight.attempts}.{run[0]}", first_sample=run[0], n=len(run)),
            flight.priority,
            {index: flight.samples[index] for index in run},
            attempts=flight.attempts,
            partial=flight.partial,
        )
        for run in runs
    ]


def fail(flight: Flight, error: BaseException) -> None:
    """Converts other exceptions to rlsdk's errors, so that they do not look like faults of the waiting rollouter."""
    shown = error if isinstance(error, RlsdkError) else WorkerError(f"{type(error).__name__}: {error}")
    for future in flight.samples.values():
        if not future.done():
            future.set_exception(shown)
            future.exception()  # marks the error as retrieved: one error per group is enough


class Flights:
    """All requests in flight: those that wait for a replica, by priority and age, and those that a replica has."""

    def __init__(self) -> None:
        self._by_name: dict[str, Flight] = {}
        self._queue: list[tuple[int, int, Flight]] = []
        self._order = itertools.count()

    @property
    def are_waiting(self) -> bool:
        """Whether a request waits for a replica."""
        return bool(self._queue)

    def add(self, flight: Flight) -> None:
        """Queues a request for a replica, unless it was cancelled."""
        if flight.samples and all(waiter.done() for waiter in flight.samples.values()):
            return
        self._by_name[flight.request.request_id] = flight
        heapq.heappush(self._queue, (flight.priority, next(self._order), flight))

    def next(self) -> Flight:
        """Takes the longest waiting request of the lowest priority number off the queue; it stays in flight."""
        return heapq.heappop(self._queue)[-1]

    def get(self, name: str) -> Flight | None:
        return self._by_name.get(name)

    def remove(self, name: str) -> Flight | None:
        """Removes a finished request; None if it was removed before."""
        return self._by_name.pop(name, None)

    def names_at(self, replica: int, prefix: str = "") -> list[str]:
        """Ids of the requests that this replica has, and that begin with `prefix`."""
        return [name for name, at in self._by_name.items() if at.replica == replica and name.startswith(prefix)]

    def take_from(self, replica: int) -> list[Flight]:
        """Removes and returns the requests that this replica has."""
        return [self._by_name.pop(name) for name in self.names_at(replica)]

    def partial(self) -> list[Kept]:
        """Partial outputs of interrupted samples that are not finished."""
        return [
            (flight.request, output)
            for flight in self._by_name.values()
            for index, output in flight.partial.items()
            if index in flight.samples
        ]

    def fail_all(self, error: BaseException) -> None:
        """Fails all requests: no replica is left."""
        for flight in self._by_name.values():
            fail(flight, error)
        self._clear()

    def cancel(self, prefix: str) -> None:
        """Cancels the waiters of requests whose ids begin with `prefix`; removes those that no replica has."""
        for name, flight in list(self._by_name.items()):
            if name.startswith(prefix):
                for waiter in flight.samples.values():
                    waiter.cancel()
                if flight.replica is None:
                    del self._by_name[name]
        self._queue = [entry for entry in self._queue if entry[2].request.request_id in self._by_name]
        heapq.heapify(self._queue)

    def cancel_all(self) -> None:
        """Cancels the waiters of all requests."""
        for flight in self._by_name.values():
            for waiter in flight.samples.values():
                waiter.cancel()
        self._clear()

    def _clear(self) -> None:
        self._by_name.clear()
        self._queue.clear()
