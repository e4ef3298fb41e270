"""Sends one message per node, not one per worker: the first worker on a node forwards calls to the others.

What a call costs the controller hardly depends on what is in it, so a step of a thousand ranks costs by the node. The
worker that relays does so on its event loop, whatever its engine is at, and answers at once where one of them fails.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from rlsdk.cluster.batches.batch_ref import StoredRows
from rlsdk.cluster.calls.handle import WorkerHandle
from rlsdk.cluster.calls.messages import Call, Failure

RELAY_RANKS = 16
"""Smallest number of called ranks for which calls are relayed; below it, direct calls are faster."""
RELAY_ON_NODE = 2
"""Smallest number of called ranks on a node for which one of them relays."""


@dataclass(frozen=True)
class Relayed:
    """A call to be forwarded to a worker of the same node."""

    worker_id: str
    sequence: int | None
    call: Call


@dataclass(frozen=True)
class Gone:
    """Stands for an answer: the worker's process ended."""


UNANSWERED = "unanswered"
"""Stands for an answer that was not waited for because another worker failed."""


def by_node(workers: Mapping[int, WorkerHandle]) -> Iterator[list[int]]:
    """Ranks that are called by one message, each list in rank order.

    Args:
        workers: of each rank that is called.
    """
    nodes: defaultdict[str, list[int]] = defaultdict(list)
    for rank, worker in workers.items():
        nodes[worker.known().node_id].append(rank)
    for ranks in nodes.values():
        if len(workers) >= RELAY_RANKS and len(ranks) >= RELAY_ON_NODE:
            yield ranks
        else:
            yield from ([rank] for rank in ranks)


@contextmanager
def numbered(workers: Sequence[WorkerHandle]) -> Iterator[list[int]]:
    """Numbers of calls that go out in one message. They are used up when it went out: when nothing is raised inside."""
    with ExitStack() as locks:
        # Always in the same order: several threads may send.
        for _, worker in sorted({worker.worker_id: worker for worker in workers}.items()):
            locks.enter_context(worker.ordering)
        numbers = [worker.take_number() for worker in workers]
        try:
            yield numbers
        except BaseException:
            for worker in workers:
                worker.give_number_back()
            raise


class Relays:
    """Tracks which workers of a group already know which others."""

    def __init__(self) -> None:
        self._knows: defaultdict[str, set[str]] = defaultdict(set)

    def send(self, workers: Sequence[WorkerHandle], calls: Sequence[Call], *, concurrent: bool) -> Any:
        """Sends the calls of all these workers to the first one, which forwards them.

        Returns:
            The reference of their answers, in the order of `calls`; see `pass_on`.
        """
        first, knows = workers[0], self._knows[workers[0].worker_id]
        known = {first.worker_id} | knows
        new = {worker.worker_id: worker.actor for worker in workers if worker.worker_id not in known}

        def sent(numbers: Sequence[int | None]) -> Any:
            relayed = [
                Relayed(worker.worker_id, number, call)
                for worker, number, call in zip(workers, numbers, calls, strict=True)
            ]
            return first.actor.relay.remote(relayed, new)

        if concurrent:
            ref = sent([None] * len(workers))
        else:
            with numbered(workers) as numbers:
                ref = sent(numbers)
        knows.update(new)
        return ref

    def forget(self, worker_id: str) -> None:
        """Forgets a process that is gone or was restarted."""
        self._knows.pop(worker_id, None)


class StoredAgain:
    """In the worker that relays: rows of its neighbours, stored by this process. One for a message.

    A reader asks an object's owner where it is, and is counted by the owner until it is done. Where the controller owns
    what every rank reads, that costs it more than the calls do.
    """

    def __init__(self) -> None:
        self._made: dict[int, asyncio.Task[StoredRows]] = {}

    async def call(self, call: Call) -> Call:
        """Returns the call with its rows replaced by an object of this process."""
        args = tuple([await self._own(value) for value in call.args])
        kwargs = {name: await self._own(value) for name, value in call.kwargs.items()}
        return replace(call, args=args, kwargs=kwargs)

    async def _own(self, value: Any) -> Any:
        # Rows of a batch that is stored once for all nodes are not copied.
        if not isinstance(value, StoredRows) or not value.of_node:
            return value
        # Ranks with the same rows are sent the same object, so it is stored once for them.
        if id(value) not in self._made:
            self._made[id(value)] = asyncio.ensure_future(asyncio.to_thread(value.stored_again))
        try:
            return await self._made[id(value)]
        except Exception:  # the call goes out all the same: its number is used up, and its reader says what is wrong
            return value


async def pass_on(relayed: Sequence[Relayed], send: Callable[[Relayed], Awaitable[Any]]) -> list[Any]:
    """In the worker that relays: the answers, in this order. The first failure ends the wait for the others, which may
    hang in a collective with the one that failed; their answers are then `UNANSWERED`.

    Args:
        relayed: calls of workers of this node.
        send: makes one of them.
    """
    import ray

    async def answer(at: int, one: Relayed) -> None:
        try:
            answers[at] = await send(one)
        except ray.exceptions.RayActorError:
            answers[at] = Gone()
        except Exception as error:  # of whatever kind: an answer that is missing must not pass for one
            answers[at] = Failure.of(error)

    answers: list[Any] = [UNANSWERED] * len(relayed)
    left = {asyncio.ensure_future(answer(at, one)) for at, one in enumerate(relayed)}
    while left:
        _, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        if any(isinstance(found, Failure | Gone) for found in answers):
            break
    return answers
