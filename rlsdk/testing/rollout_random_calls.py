"""Requirements: random sequences of calls over the lifetime of an engine. The checks are those that `rollout_oracle`
makes of every answer; only the order of calls is random."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from rlsdk.interfaces import Capability, ConfigError, GenerationRequest, RolloutEngine, WeightShard
from rlsdk.testing.requirements import Measured, requirement
from rlsdk.testing.rollout_lab import RolloutLab, collect, pieces, whole_shards
from rlsdk.testing.rollout_requests import at_random

LIVES = 3
EVENTS = 14
"""Number of events in one life."""

Event = Callable[["Life"], Awaitable[None]]


class RandomCallRequirements:
    """Mixed into `RolloutConformance`."""

    @requirement("life", since=(2, 0))
    def test_life(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Single and concurrent calls, aborts, pauses, abandoned calls, updates, sleep, refusals and repeated requests
        in random order: every answer fits its request and is of the weights that it names."""
        for seed in range(LIVES):
            if lab.spec.takes_weights:
                lab.restore()
            life = Life(lab, engine, seed)
            lab.wait(life.lived())
            measured.none(f"requests that were accepted, life {seed}", life.accepted)
            measured.record(f"events, life {seed}", len(life.events_done))
        if lab.spec.takes_weights:
            lab.restore()


class Life:
    """One engine, and the events in its life."""

    def __init__(self, lab: RolloutLab, engine: RolloutEngine, seed: int) -> None:
        self.lab, self.engine, self.seed = lab, engine, seed
        self.source = random.Random(seed)
        self.asked: list[GenerationRequest] = []
        self.events_done: list[str] = []
        self.accepted: list[str] = []
        self.num_calls = 0
        self.states = [lab.base, lab.changed(0), lab.changed(1)]
        self.serving = 0
        """Index of the served weights."""

    async def lived(self) -> None:
        events = list(self._events())
        # Every event once, then random ones.
        order = [*self.source.sample(events, len(events)), *self.source.choices(events, k=EVENTS)][:EVENTS]
        for event in order:
            self.events_done.append(event.__name__)
            await event()
        await self._call()

    def _events(self) -> Iterator[Callable[[], Awaitable[None]]]:
        claimed = self.lab.spec.capabilities
        yield from (self._call, self._again, self._refused, self._left)
        if Capability.ABORT in claimed:
            yield from (self._together, self._aborted)
        if Capability.PARTIAL_ROLLOUT in claimed:
            yield from (self._paused, self._paused, self._paused)
        if self.lab.spec.takes_weights:
            yield from (self._updated, self._failed)
        if Capability.SLEEP in claimed:
            yield self._slept

    def _requests(self, count: int) -> list[GenerationRequest]:
        self.num_calls += 1
        found = list(at_random(self.lab, 100 * (self.seed + 1) + self.num_calls, count))
        self.asked += [request for request in found if request.sampling.seed is not None]
        return found

    async def _steps(self, most: int = 12) -> None:
        """Waits for a few decoding steps of any kind of engine."""
        for _ in range(self.source.randrange(1, most)):
            await asyncio.sleep(0)
        if self.source.random() < 0.5:
            await asyncio.sleep(0.01)

    def _task(self, count: int = 3) -> tuple[list[GenerationRequest], asyncio.Task[Any]]:
        requests = self._requests(count)
        return requests, asyncio.create_task(collect(self.engine, requests))

    async def _call(self) -> None:
        await collect(self.engine, self._requests(4))

    async def _again(self) -> None:
        """Repeats some earlier requests together with others, with another part of their groups."""
        if not self.asked:
            return await self._call()
        known = self.source.choices(self.asked, k=3)
        again = [
            replace(request, request_id=f"again {at}", n=request.n + self.source.randrange(2))
            for at, request in enumerate(known)
        ]
        await collect(self.engine, [*again, *self._requests(1)])
        return None

    async def _refused(self) -> None:
        good = self._requests(2)
        wrong = replace(good[0], request_id="wrong", prompt_ids=())
        try:
            await collect(self.engine, [*good, wrong])
        except ConfigError:
            return
        self.accepted.append("an empty prompt")

    async def _left(self) -> None:
        stream: Any = self.engine.generate(self._requests(3))
        async for _ in stream:
            break
        await stream.aclose()

    async def _together(self) -> None:
        tasks = []
        for _ in range(3):
            tasks.append(self._task(2)[1])
            await self._steps()
        await asyncio.gather(*tasks)

    async def _aborted(self) -> None:
        requests, task = self._task()
        other = self._task(1)[1] if self.source.random() < 0.5 else None
        await self._steps()
        names = [request.request_id for request in requests]
        self.engine.abort(self.source.choice((None, names[:1], names, [], ["unknown", names[-1]])))
        await asyncio.gather(*(one for one in (task, other) if one is not None))

    async def _paused(self) -> None:
        """A pause, with or without an update, an abort, a new call and an abandoned call in it."""
        requests, task = self._task(4)
        tasks = [task]
        await self._steps(20)
        self.engine.pause()
        await asyncio.sleep(0.02)
        happens = ["update"] if self.lab.spec.takes_weights and self.source.random() < 0.8 else []
        if Capability.ABORT in self.lab.spec.capabilities:
            happens += [name for name in ("abort", "call") if self.source.random() < 0.5]
        for name in self.source.sample(happens, len(happens)):
            if name == "update":
                self._update()
            elif name == "abort":
                self.engine.abort([self.source.choice(requests).request_id])
            else:
                tasks.append(self._task(2)[1])
                await self._steps()
        self.engine.resume()
        await asyncio.gather(*tasks)

    async def _updated(self) -> None:
        self._update()
        if self.source.random() < 0.3:
            self._update()

    async def _failed(self) -> None:
        """An update whose source raises, then a complete one."""

        def broken() -> Iterator[WeightShard]:
            yield from pieces(self.lab.changed(self.source.randrange(50)))[: self.source.randrange(1, 9)]
            raise BrokenSourceError

        try:
            self.engine.update_weights(broken(), 77)
            self.accepted.append("a source that raised")
        except BrokenSourceError:
            pass
        self._update()

    async def _slept(self) -> None:
        level = self.source.choice((1, 2)) if self.lab.spec.takes_weights else 1
        self.engine.sleep(level)
        self.engine.wake(("weights",))
        if level == 2 or (self.lab.spec.takes_weights and self.source.random() < 0.5):
            self._update()
        self.engine.wake(("kv_cache",))

    def _update(self) -> None:
        # Weights other than the served ones, so that a tensor that an update misses shows.
        self.serving = self.source.choice([at for at in range(len(self.states)) if at != self.serving])
        state = self.states[self.serving]
        laid: Sequence[WeightShard] | Iterator[WeightShard]
        laid = self.source.choice((whole_shards, pieces))(state)
        self.engine.update_weights(iter(laid), self.source.choice((0, 1, 1, 2, 5, 2**40)))


class BrokenSourceError(Exception):
    """Raised by a source."""
