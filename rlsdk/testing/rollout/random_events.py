"""A life of a rollout engine: calls and other events in random order. The checks are those that `rollout_oracle` makes
of every answer; only the order is random."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import cast

from rlsdk.interfaces import (
    Capability,
    ConfigError,
    GenerationOutput,
    GenerationRequest,
    RlsdkError,
    RolloutEngine,
    WeightShard,
    WeightSyncError,
)
from rlsdk.testing.process.modes import random_states, torch_modes
from rlsdk.testing.rollout.abandoned_calls import LEAVING, at_once
from rlsdk.testing.rollout.lab import RolloutLab, decoded, pieces, whole_shards
from rlsdk.testing.rollout.random_updates import Updates
from rlsdk.testing.rollout.requests import at_random
from rlsdk.testing.suites.requirements import Measured

EVENTS = 24
"""Number of events in one life."""
FEW_EVENTS = 18
"""Number of events in a life of an engine with another model."""
ELSEWHERE_S = 0.01
"""Seconds after which another thread calls the engine."""
POLL_S = 0.003
"""Seconds between two readings of what a host polls."""
SPOILT = 78
"""Version of weights that are not finite."""
STEPS_S = 0.03
"""Most seconds that a life waits for a few tokens: in a pause none come."""
IDLE_S = 2.0
"""Seconds in which a KV cache becomes empty after its last sample has ended."""


class Life:
    """One engine, and the events in its life."""

    def __init__(self, lab: RolloutLab, engine: RolloutEngine, seed: int, room: int | None = None) -> None:
        """
        Args:
            lab: lab of the engine's model.
            engine: serves the lab's first weights.
            seed: chooses the events.
            room: the engine's `max_model_tokens`; None: the suite's.
        """
        self.lab, self.engine, self.seed, self.room = lab, engine, seed, room
        self.source = random.Random(seed)
        self.asked: list[GenerationRequest] = []
        self.drawn: list[tuple[GenerationRequest, GenerationOutput]] = []
        """Seeded samples of more than one token."""
        self.events_done: list[str] = []
        self.faults: list[str] = []
        self.num_calls = 0
        self.num_decoded = 0
        """As last polled."""
        self.peeking = threading.Lock()
        self.updates = Updates(lab, engine, self.source, self.faults)
        self.layouts = list(engine.layout()) if lab.spec.takes_weights else []

    def run(self, measured: Measured, name: str, num_events: int = EVENTS) -> None:
        """Lives it, and reports its faults under this name."""
        before = self.lab.wait(at_once(self.lab, self.engine))
        with self._polled():
            self.lab.wait(self._lived(num_events))
        if before is not None:
            after = self.lab.wait(at_once(self.lab, self.engine))
            measured.at_least(f"samples at once after {name}", after or 0, 0.9 * before)
        measured.none(f"faults, {name}: {', '.join(self.events_done)}", self.faults)
        measured.record(f"events, {name}", len(self.events_done))

    def _peek(self) -> bool:
        """Reads what a host polls, and says whether it makes sense."""
        with self.peeking:
            try:
                decoded, used = self.engine.num_decoded(), self.engine.kv_used()
            except Exception as error:
                self.faults.append(f"polled during {self.events_done[-1:]}: {type(error).__name__}: {error}")
                return False
            is_right = (decoded is None or decoded >= self.num_decoded) and (used is None or 0 <= used <= 1)
            self.faults += [] if is_right else [f"num_decoded {decoded} after {self.num_decoded}, kv_used {used}"]
            self.num_decoded = decoded or 0
            return is_right

    @contextmanager
    def _polled(self) -> Iterator[None]:
        """Within this context another thread reads what a host polls, whatever the engine does."""
        ended = threading.Event()

        def poll() -> None:
            while not ended.wait(POLL_S) and self._peek():
                pass

        thread = threading.Thread(target=poll)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    async def _lived(self, num_events: int) -> None:
        events = list(self._events())
        # Every event once, then random ones.
        order = [*self.source.sample(events, len(events)), *self.source.choices(events, k=num_events)][:num_events]
        for event in order:
            self.events_done.append(event.__name__.lstrip("_"))
            modes, states = torch_modes(), random_states()
            await event()
            said = self.events_done[-1]
            self.faults += [f"{name} is left {value} by {said}" for name, value in torch_modes() - modes]
            moved = [name for name, state in random_states().items() if state != states[name] and name != "random"]
            self.faults += [f"{said} advanced the generator of {name}" for name in moved]
            await self._is_idle()
        await self._call()

    def _events(self) -> Iterator[Callable[[], Awaitable[None]]]:
        claimed = self.lab.spec.capabilities
        yield from (self._call, self._again, self._continued, self._refused, self._left, self._within)
        if Capability.ABORT in claimed:
            yield from (self._together, self._aborted)
        if Capability.PARTIAL_ROLLOUT in claimed:
            yield from (self._paused, self._paused, self._paused)
        if self.lab.spec.takes_weights:
            yield from (self._updated, self._updated_meanwhile, self._failed, self._not_finite)
            if Capability.PARTIAL_ROLLOUT in claimed:
                yield self._not_finite_in_a_pause
        if Capability.SLEEP in claimed:
            yield from (self._slept, self._slept)

    async def _is_idle(self) -> None:
        """Reads what may be read at any time."""
        deadline = asyncio.get_running_loop().time() + IDLE_S
        while (used := self.engine.kv_used()) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        self.faults += [f"kv_used is {used} after {self.events_done[-1]}"] if used else []
        if self.layouts and self.source.random() < 0.3 and list(self.engine.layout()) != self.layouts:
            self.faults.append(f"another layout after {self.events_done[-1]}")

    def _requests(self, count: int) -> list[GenerationRequest]:
        self.num_calls += 1
        found = list(at_random(self.lab, 100 * (self.seed + 1) + self.num_calls, count, self.room))
        self.asked += [request for request in found if request.sampling.seed is not None]
        return found

    async def _collect(self, requests: list[GenerationRequest]) -> None:
        async with aclosing(self._samples(requests)) as outputs:
            async for _ in outputs:
                if self.source.random() < 0.1:
                    await asyncio.sleep(0.005)  # a caller that is slow

    async def _samples(self, requests: list[GenerationRequest]) -> AsyncGenerator[GenerationOutput, None]:
        by_id = {request.request_id: request for request in requests}
        stream = cast("AsyncGenerator[GenerationOutput, None]", self.engine.generate(requests))
        async with aclosing(stream) as outputs:
            async for output in outputs:
                request = by_id.get(output.request_id)
                if request is not None and request.sampling.seed is not None and len(output.token_ids) > 1:
                    self.drawn.append((request, output))
                if any(run.version == SPOILT and run.num_tokens for run in output.versions):
                    self.faults.append("tokens of weights that are not finite")
                yield output

    async def _steps(self, most: int = 12) -> None:
        """Waits for a few decoded tokens."""
        await decoded(self.engine, self.source.randrange(1, 2 * most), STEPS_S)

    def _task(self, count: int = 3) -> tuple[list[GenerationRequest], asyncio.Task[None]]:
        requests = self._requests(count)
        return requests, asyncio.create_task(self._collect(requests))

    def _long_task(self) -> asyncio.Task[None]:
        """A call that is seldom done before it is abandoned."""
        room = self.room or self.lab.suite.max_model_tokens
        request = self.lab.ask("long", self.lab.prompt(6, 263), 3, max_tokens=room // 2, seed=self.num_calls)
        return asyncio.create_task(self._collect([request]))

    async def _anywhere(self, method: Callable[..., None], *arguments: object) -> None:
        """Calls a method that every thread may call."""
        if self.source.random() < 0.4:
            await asyncio.to_thread(method, *arguments)
        else:
            method(*arguments)

    async def _elsewhere(
        self, tasks: list[asyncio.Task[None]], method: Callable[..., None], *arguments: object
    ) -> None:
        """Calls a method, perhaps on a thread that does not wake the event loop, and awaits these calls."""
        if self.source.random() < 0.5:
            method(*arguments)
            await asyncio.gather(*tasks)
            return
        thread = threading.Timer(ELSEWHERE_S, method, arguments)
        thread.start()
        try:
            await asyncio.gather(*tasks)
        finally:
            thread.join()

    async def _call(self) -> None:
        await self._collect(self._requests(4))

    async def _again(self) -> None:
        """Repeats some earlier requests together with others, with another part of their groups."""
        if not self.asked:
            return await self._call()
        known = self.source.choices(self.asked, k=3)
        again = [
            replace(request, request_id=f"again {at}", n=request.n + self.source.randrange(2))
            for at, request in enumerate(known)
        ]
        await self._collect([*again, *self._requests(1)])
        return None

    async def _continued(self) -> None:
        """Continues earlier samples after some of their tokens, alone or with others of their groups."""
        if not self.drawn:
            return await self._call()
        requests = []
        for at, (request, output) in enumerate(self.source.choices(self.drawn, k=4)):
            given = output.token_ids[: self.source.randrange(1, len(output.token_ids))].tolist()
            again = replace(
                request, request_id=f"more {at}", response_ids=(*request.response_ids, *given),
                first_sample=output.sample_index, n=self.source.choice((1, 1, 3)),
            )  # fmt: skip
            requests.append(again)
        await self._collect([*requests, *self._requests(1)])
        return None

    async def _refused(self) -> None:
        good = self._requests(2)
        wrong = replace(good[0], request_id="wrong", prompt_ids=())
        try:
            await self._collect([*good, wrong])
            self.faults.append("an empty prompt was accepted")
        except ConfigError:
            pass

    async def _left(self) -> None:
        """A call that its caller abandons, alone or beside another call, whose requests have the same ids."""
        is_shared = Capability.ABORT in self.lab.spec.capabilities and self.source.random() < 0.6
        other = self._task()[1] if is_shared else None
        leave = LEAVING[self.source.choice(list(LEAVING))]
        await leave(self.engine, self._requests(3))
        if other is not None:
            await other

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
        chosen = self.source.choice((None, names[:1], names, [], ["unknown", names[-1]]))
        await self._elsewhere([one for one in (task, other) if one is not None], self.engine.abort, chosen)

    async def _paused(self) -> None:
        """One pause or two, with or without updates, an abort, a new call and an abandoned call in it."""
        requests, task = self._task(4)
        tasks, num_pauses = [task], self.source.choice((1, 1, 2))
        shares = Capability.ABORT in self.lab.spec.capabilities
        leaving = self._long_task() if shares and self.source.random() < 0.5 else None
        for pause in range(num_pauses):
            await self._steps(20)
            await self._anywhere(self.engine.pause)
            await asyncio.sleep(0.02)
            happens = ["update"] if self.lab.spec.takes_weights and self.source.random() < 0.8 else []
            if shares:
                happens += [name for name in ("abort", "call") if self.source.random() < 0.5]
            happens += ["leave"] if leaving is not None else []
            for name in self.source.sample(happens, len(happens)):
                chosen = [self.source.choice(requests).request_id]
                if name == "update":
                    self.updates.send(chosen if self.source.random() < 0.2 else ())
                elif name == "abort":
                    await self._anywhere(self.engine.abort, chosen)
                elif name == "call":
                    tasks.append(self._task(2)[1])
                    await self._steps()
                elif leaving is not None:
                    await _cancelled(leaving)
                    leaving = None
            if pause < num_pauses - 1:
                await self._anywhere(self._resume)
        await self._elsewhere(tasks, self._resume)

    def _resume(self) -> None:
        if Capability.STALE_CACHE in self.lab.spec.capabilities and self.source.random() < 0.2:
            self.engine.resume(keep_cache=True)
        else:
            self.engine.resume()

    async def _within(self) -> None:
        """What a caller does between two samples of its call: it aborts the others, pauses, updates, makes another
        call. Samples that have ended by then stay as they are."""
        claimed, requests = self.lab.spec.capabilities, self._requests(3)
        acts: list[Callable[[], Awaitable[None]]] = [partial(asyncio.sleep, 0.01)]
        if Capability.ABORT in claimed:
            names = [request.request_id for request in requests]
            acts += [self._call, partial(self._anywhere, self.engine.abort, names)]
        if Capability.PARTIAL_ROLLOUT in claimed:
            acts.append(self._paused_briefly)
        if self.lab.spec.takes_weights:
            acts += [self._updated_if_idle] * 2
        act, at, seen = self.source.choice(acts), self.source.choice((0, 0, 1, 3)), 0
        if act == self._updated_if_idle and self.source.random() < 0.7:
            # All of them end in one step.
            short = replace(requests[0].sampling, max_tokens=2)
            requests = [replace(requests[0], n=6, response_ids=(), sampling=short)]
        async with aclosing(self._samples(requests)) as outputs:
            async for _ in outputs:
                if seen == at:
                    await act()
                seen += 1

    async def _paused_briefly(self) -> None:
        await self._anywhere(self.engine.pause)
        await asyncio.sleep(0.01)
        if self.lab.spec.takes_weights and self.source.random() < 0.7:
            self.updates.send()
        await self._anywhere(self.engine.resume)

    async def _updated_if_idle(self) -> None:
        """An update, if nothing of this call still runs."""
        await asyncio.sleep(0.01)
        with suppress(WeightSyncError):
            self.updates.send()

    async def _updated(self) -> None:
        self.updates.send()
        if self.source.random() < 0.3:
            self.updates.send()

    async def _updated_meanwhile(self) -> None:
        """An update while samples run: it may be refused, without effect on them."""
        _, task = self._task()
        await self._steps()
        try:
            self.updates.send()
        except WeightSyncError as error:
            if task.done():
                self.faults.append(f"an idle engine refused an update: {error}")
        await task

    async def _failed(self) -> None:
        """An update whose source raises, perhaps a sleep or a pause without weights, then a complete one."""

        def broken() -> Iterator[WeightShard]:
            yield from pieces(self.lab.changed(self.source.randrange(50)))[: self.source.randrange(1, 9)]
            raise BrokenSourceError

        try:
            self.engine.update_weights(broken(), 77)
            self.faults.append("a source that raised was not noticed")
        except BrokenSourceError:
            self._peek()
        claimed = self.lab.spec.capabilities
        if Capability.ABORT in claimed and self.source.random() < 0.3:
            await self._anywhere(self.engine.abort)
        if Capability.SLEEP in claimed and self.source.random() < 0.5:
            await self._slept_at(self.source.choice(((1,), (2,))), is_lost=True)
        else:
            self.updates.send()

    async def _not_finite(self) -> None:
        """An update to weights from which nothing may be sampled, not even by calls that are aborted, then a complete
        one."""
        state = self.updates.spoilt()
        with suppress(RlsdkError):
            self.engine.update_weights(whole_shards(state), SPOILT)
            requests = [replace(one, response_ids=()) for one in self._requests(2)]
            task = asyncio.create_task(self._num_tokens(requests))
            if Capability.ABORT in self.lab.spec.capabilities and self.source.random() < 0.6:
                await self._steps(5)
                self.engine.abort()
            if await task:
                self.faults.append("a sample of weights that are not finite")
        self.updates.send()

    async def _num_tokens(self, requests: Sequence[GenerationRequest]) -> int:
        return sum([len(output.token_ids) async for output in self.engine.generate(requests)])

    async def _not_finite_in_a_pause(self) -> None:
        """The same while samples are paused: they survive an update that is refused, and end if it is accepted."""
        _, task = self._task()
        await self._steps()
        await self._anywhere(self.engine.pause)
        await asyncio.sleep(0.02)
        try:
            self.engine.update_weights(whole_shards(self.updates.spoilt()), SPOILT)
        except WeightSyncError:
            self.updates.send()
            await self._elsewhere([task], self.engine.resume)
            return
        with suppress(RlsdkError):
            await self._elsewhere([task], self.engine.resume)
        self.updates.send()

    async def _slept(self) -> None:
        levels = self.source.choice(((1,), (1,), (2,), (1, 2))) if self.lab.spec.takes_weights else (1,)
        await self._slept_at(levels)

    async def _slept_at(self, levels: Sequence[int], *, is_lost: bool = False) -> None:
        """Sleeps at these levels and wakes in stages, perhaps paused or with an abort at any moment.

        Args:
            levels: levels of the calls of `sleep`.
            is_lost: there were no weights before.
        """
        claimed = self.lab.spec.capabilities
        holds = Capability.PARTIAL_ROLLOUT in claimed and self.source.random() < 0.5
        needs_weights = 2 in levels or is_lost
        paused_at = self.source.randrange(4) if holds else -1
        for moment in range(4):
            if moment == paused_at:
                await self._anywhere(self.engine.pause)
            if moment and Capability.ABORT in claimed and self.source.random() < 0.15:
                await self._anywhere(self.engine.abort)
            if moment == 0:
                for level in levels:
                    self.engine.sleep(level)
                    self._peek()
                weights_first = self.source.random() < 0.7
            elif moment == 1:
                self.engine.wake(("weights",) if weights_first else ("kv_cache",))
                self._peek()
            elif moment == 2:
                if weights_first and self.lab.spec.takes_weights and (needs_weights or self.source.random() < 0.5):
                    self.updates.send()
                self.engine.wake(("kv_cache",) if weights_first else ("weights",))
        if needs_weights and not weights_first:
            self.updates.send()
        if holds:
            # The pause holds after the engine woke.
            before, task = self.engine.num_decoded(), self._task(2)[1]
            await self._steps()
            await asyncio.sleep(0.02)
            if task.done() or self.engine.num_decoded() != before:
                self.faults.append(f"tokens that came in a pause, {'before' * (not paused_at)} a sleep at {levels}")
            await self._elsewhere([task], self.engine.resume)


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


class BrokenSourceError(Exception):
    """Raised by a source."""
