"""The request-level client: one queue in front of all replicas of a rollout engine.

Work goes to the replica with the least outstanding tokens, one request at a time. With several replicas a request is
sent only where a slot is free, so no replica idles while another has a queue. What a replica lost is sent to another:
seeds make the same tokens there.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlsdk.interfaces import DeadlineError, FinishReason, GenerationOutput, GenerationRequest, WorkerError
from rlsdk.rollouts.concurrency import ConcurrencyMeter
from rlsdk.rollouts.flights import Flight, Waiter, fail, reissued
from rlsdk.rollouts.health import Event, State
from rlsdk.rollouts.lines import Line, NoRestarts, Replica, Restarts
from rlsdk.rollouts.partial import joined, unfinished
from rlsdk.rollouts.pump import Collected

LOOK_S = 0.5
"""Longest that a replica is asked to wait for a sample before it answers with none."""
SUSPECT_SHARE, SUSPECT_S = 0.25, 30.0
"""A replica without progress for this share of its deadline, or so many seconds, gets nothing new."""


SampleSeed = tuple[int | None, int]
"""Seed of a request, and index of a sample: what its tokens follow from."""
Kept = tuple[GenerationRequest, GenerationOutput]
"""What an unfinished sample has: all its tokens so far."""


class GenerationClient:
    """Sends requests, hands each sample to its awaiting coroutine. Lives on one event loop; `run` must be running."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        progress_s: float,
        max_attempts: int = 3,
        adapts: bool = False,
        restarts: Restarts | None = None,
    ) -> None:
        """Connects to nothing yet.

        Args:
            replicas: at least one.
            progress_s: a replica that has work and decodes no token for so long is lost.
            max_attempts: replicas that may lose a request before it is given up.
            adapts: samples under way at each replica follow its measured throughput, up to `Replica.max_running`.
            restarts: starts lost replicas anew; None: they stay lost.
        """
        self._restarts = restarts or NoRestarts(len(replicas))
        self._lines = [
            Line(replica, health, meter=ConcurrencyMeter(replica.max_running) if adapts else None)
            for replica, health in zip(replicas, self._restarts.health, strict=True)
        ]
        self._limits = adapts or len(replicas) > 1
        self._progress_s = progress_s
        self._max_attempts = max_attempts
        self._queue: list[tuple[int, int, Flight]] = []
        self._order = itertools.count()
        self._flights: dict[str, Flight] = {}
        self._work = [asyncio.Event() for _ in replicas]
        self._flush_is_due = False
        self._sending: set[asyncio.Task[None]] = set()
        self._interrupted = False
        self._halted = False
        self._kept: list[Kept] = []
        self._begun: dict[SampleSeed, GenerationOutput] = {}

    def busy_s(self) -> float:
        """Seconds in which replicas had samples to make, added up over them. May be called from any thread."""
        now = time.monotonic()
        return sum(line.busy_s + (now - since if (since := line.since) is not None else 0.0) for line in self._lines)

    def concurrency(self) -> float:
        """Samples that a replica may have under way, on the average of those that live. From any thread."""
        limits = [line.limit for line in self._lines if line.error is None]
        return sum(limits) / max(len(limits), 1)

    @property
    def num_replicas(self) -> int:
        """Those that were lost included."""
        return len(self._lines)

    async def interrupt(self) -> None:
        """Brings all decoding to a stop, for an update of the weights; requests wait meanwhile."""
        self._interrupted = True
        await asyncio.gather(*(self._interrupt(at) for at in range(len(self._lines))))

    async def go_on(self, *, keep_cache: bool) -> None:
        """Goes on with what `interrupt` stopped; `keep_cache`: with the keys and values of older weights."""
        await asyncio.gather(*(self._resume(at, keep_cache) for at in range(len(self._lines))))
        for line in self._lines:
            line.moved = time.monotonic()
        self._interrupted = self._halted
        self._flush_soon()

    async def halt(self, timeout_s: float) -> Sequence[Kept]:
        """Stops all decoding for good. What is waited for does not come any more.

        Args:
            timeout_s: replicas that have not told by then what their samples had are left alone.

        Returns:
            What unfinished samples have, and the request of each.
        """
        self._interrupted = self._halted = True
        end = time.monotonic() + timeout_s
        while time.monotonic() < end and any(line.samples and line.error is None for line in self._lines):
            for at, line in enumerate(self._lines):
                names = [name for name, flight in self._flights.items() if flight.replica == at]
                if names and line.error is None:
                    with contextlib.suppress(Exception):  # its own loop learns of it
                        await asyncio.wait_for(line.replica.abort(names), end - time.monotonic())
            await asyncio.sleep(LOOK_S / 10)
        begun = [
            (flight.request, output)
            for flight in self._flights.values()
            for index, output in flight.begun.items()
            if index in flight.samples
        ]
        return [*self._kept, *begun]

    def begin_with(self, begun: Mapping[SampleSeed, GenerationOutput]) -> None:
        """What samples of requests to come have already, from an earlier process: they go on behind that."""
        self._begun.update(begun)

    async def _resume(self, at: int, keep_cache: bool) -> None:
        line = self._lines[at]
        if line.paused and line.error is None:
            life, line.paused = line.life, False
            try:
                await line.replica.resume(keep_cache)
            except Exception as error:
                self._line_failed(at, life, error)

    async def _interrupt(self, at: int) -> None:
        line = self._lines[at]
        while self._sending:  # What is on its way out must have arrived: an abort means what an engine has.
            await asyncio.wait(set(self._sending))
        life = line.life
        try:
            if line.error is None and line.replica.keeps_unfinished:
                line.paused = True
                await line.replica.pause()
                return
            while line.samples and line.error is None:
                await line.replica.abort([name for name, flight in self._flights.items() if flight.replica == at])
                await asyncio.sleep(LOOK_S / 50)
        except Exception as error:
            self._line_failed(at, life, error)

    def generate(
        self, request: GenerationRequest, *, priority: int = 0
    ) -> Mapping[int, asyncio.Future[GenerationOutput]]:
        """Queues a request; the result holds a future for each of its samples, by index.

        Args:
            request: with an id that no other request under way has.
            priority: lower goes first; of equal ones, who came first.
        """
        loop = asyncio.get_running_loop()
        indices = range(request.first_sample, request.first_sample + request.n)
        futures = {index: loop.create_future() for index in indices}
        self.deliver(request, futures, priority=priority)
        return futures

    def deliver(self, request: GenerationRequest, samples: Mapping[int, Waiter], *, priority: int = 0) -> None:
        """As `generate`, for those who wait: one for each sample, by index."""
        indices = sorted(samples)
        flight = Flight(request, priority, dict(samples))
        if self._begun and (begun := self._begun_of(request, indices)):
            for index, output in begun.items():
                self._continue(flight, output, flight.samples.pop(index))
            flights = reissued(flight)
        else:
            flights = [flight]
        for one in flights:
            self._flights[one.request.request_id] = one
            self._enqueue(one)

    def _begun_of(self, request: GenerationRequest, indices: Sequence[int]) -> dict[int, GenerationOutput]:
        seeds = {index: (request.sampling.seed, index) for index in indices}
        found = {index: self._begun.pop(seed) for index, seed in seeds.items() if seed in self._begun}
        return {index: output for index, output in found.items() if len(output.token_ids) < request.sampling.max_tokens}

    async def run(self) -> None:
        """Collects from every replica until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            for at in range(len(self._lines)):
                group.create_task(self._collect(at))

    def abort_all(self) -> None:
        """Ends whatever is under way: futures are cancelled, replicas are told to stop."""
        for flight in self._flights.values():
            for future in flight.samples.values():
                future.cancel()
        names: list[list[str]] = [[] for _ in self._lines]
        for name, flight in self._flights.items():
            if flight.replica is not None:
                names[flight.replica].append(name)
        for line, those in zip(self._lines, names, strict=True):
            if those:
                self._background(line.replica.abort(those))
        self._flights.clear()
        self._queue.clear()

    def _enqueue(self, flight: Flight) -> None:
        heapq.heappush(self._queue, (flight.priority, next(self._order), flight))
        self._flush_soon()

    def _flush_soon(self) -> None:
        """What comes in one turn of the loop goes out as one message per replica."""
        if not self._flush_is_due:
            self._flush_is_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_is_due = False
        if self._interrupted:
            return
        errors = [line.error for line in self._lines if line.error is not None and line.health.state is State.RETIRED]
        if len(errors) == len(self._lines):
            self._give_up(errors[-1])
        while self._queue and (at := self._choose()) is not None:
            _, _, flight = heapq.heappop(self._queue)
            self._assign(flight, at)
        for at, line in enumerate(self._lines):
            if line.to_send:
                requests, line.to_send = line.to_send, []
                self._background(self._send(at, requests))
                self._work[at].set()

    def _choose(self) -> int | None:
        """The replica with the least outstanding tokens among those with a free slot."""
        healthy = [line.error is None and line.health.state is State.HEALTHY for line in self._lines]
        alive = [at for at, is_healthy in enumerate(healthy) if is_healthy]
        if self._limits:
            alive = [at for at in alive if self._lines[at].samples < self._lines[at].limit]
        return min(alive, key=lambda at: (self._lines[at].tokens, at), default=None)

    def _assign(self, flight: Flight, at: int) -> None:
        line = self._lines[at]
        if not line.samples:
            line.moved, line.life = time.monotonic(), line.health.life
        flight.replica = at
        flight.attempts += 1
        line.count(len(flight.samples))
        line.tokens += flight.tokens
        line.to_send.append(flight.request)

    async def _send(self, at: int, requests: Sequence[GenerationRequest]) -> None:
        life = self._lines[at].life
        try:
            await self._lines[at].replica.submit(requests)
        except Exception as error:
            self._line_failed(at, life, error)

    async def _collect(self, at: int) -> None:
        """Asks one replica for as long as it has work, through any number of its lives."""
        line = self._lines[at]
        while True:
            while not line.samples and line.error is None:
                self._work[at].clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._work[at].wait(), LOOK_S)
                if line.health.state is State.RETIRED:  # lost while it had nothing to make, as in a sync
                    line.error = WorkerError(f"{line.replica.name} was lost and stays away")
            life = line.life
            if line.error is None:
                try:
                    self._take(at, await self._answer(at))
                except Exception as error:
                    self._line_failed(at, life, error)
            if line.error is not None and not await self._is_revived(at):
                return

    async def _answer(self, at: int) -> Collected:
        """What one replica has made; one that does not answer at all is held to the deadline of progress, too.

        Raises:
            DeadlineError: it did not, or decoded nothing for as long.
        """
        line = self._lines[at]
        asked = asyncio.ensure_future(line.replica.collect(LOOK_S))
        try:
            while line.error is None:
                done, _ = await asyncio.wait({asked}, timeout=LOOK_S * 2)
                if done:
                    return asked.result()
                self._check_progress(at)
            raise line.error
        finally:
            asked.cancel()

    async def _is_revived(self, at: int) -> bool:
        """Waits for a new process in place of one that was lost; False where there will be none."""
        line = self._lines[at]
        assert line.error is not None
        try:
            await self._restarts.revive(at, line.life, line.error)
        except Exception as error:
            line.error = error
        else:
            line.error, line.paused, line.seen = None, False, (None, 0)
            line.life, line.moved = line.health.life, time.monotonic()
            if line.meter is not None:
                line.meter = ConcurrencyMeter(line.replica.max_running)
        self._flush_soon()
        return line.error is None

    def _take(self, at: int, came: Collected) -> None:
        line = self._lines[at]
        for output in came.outputs.unpack():
            self._finish(at, output)
        for lost in came.lost:
            for name in lost.request_ids:
                self._request_lost(at, name, lost.error)
        line.measure(came, waiting=bool(self._queue) and not self._interrupted)
        progress = (came.num_decoded, line.seen[1] + len(came.outputs))
        if progress != line.seen or came.lost:
            line.seen, line.moved = progress, time.monotonic()
            line.health.handle(Event.ANSWERED, line.life)
        else:
            self._check_progress(at)
        if self._queue:
            self._flush_soon()

    def _check_progress(self, at: int) -> None:
        """Raises `DeadlineError` where a replica that has work made no progress for too long."""
        line = self._lines[at]
        silent_s = time.monotonic() - line.moved
        if not line.samples or self._interrupted:
            return
        if silent_s > self._progress_s:
            raise DeadlineError(
                f"{line.replica.name} has {line.samples} samples to make and decoded no token for "
                f"{self._progress_s:g} s (deadlines.rollout_s)"
            )
        if silent_s > min(self._progress_s * SUSPECT_SHARE, SUSPECT_S):
            line.health.handle(Event.LATE, line.life)

    def _finish(self, at: int, output: GenerationOutput) -> None:
        flight = self._flights.get(output.request_id)
        future = flight.samples.pop(output.sample_index, None) if flight is not None else None
        if flight is None or future is None:
            return  # aborted meanwhile, or given by a replica that was taken for dead
        line = self._lines[at]
        line.count(-1)
        line.tokens -= flight.request.sampling.max_tokens - len(flight.request.response_ids)
        if not flight.samples:
            line.tokens -= len(flight.request.prompt_ids)
            del self._flights[output.request_id]
        if (begun := flight.begun.get(output.sample_index)) is not None:
            output = joined(begun, output)
        if self._halted and output.finish_reason is FinishReason.ABORT:
            if len(output.token_ids):
                self._kept.append((flight.request, output))
        elif self._interrupted and output.finish_reason is FinishReason.ABORT:
            self._continue(flight, output, future)
        elif not future.done():
            future.set_result(output)

    def _continue(self, flight: Flight, output: GenerationOutput, waiter: Waiter) -> None:
        """Queues an interrupted sample anew, behind the tokens that it has."""
        index = output.sample_index
        name = f"{flight.request.request_id.partition('~')[0]}~s{index}.{next(self._order)}"
        request = replace(unfinished(flight.request, output), request_id=name)
        again = Flight(request, flight.priority, {index: waiter}, attempts=flight.attempts)
        if len(output.token_ids):
            again.begun[index] = output
        self._flights[name] = again
        self._enqueue(again)

    def _request_lost(self, at: int, name: str, error: BaseException) -> None:
        """An engine refused or dropped a request: that is an answer, not a lost replica."""
        flight = self._flights.pop(name, None)
        if flight is not None:
            self._lines[at].count(-len(flight.samples))
            self._lines[at].tokens -= flight.tokens
            fail(flight, error)

    def _line_failed(self, at: int, life: int, error: BaseException) -> None:
        """Issues again what a process of a replica had, for others to take."""
        line = self._lines[at]
        if line.error is not None or line.life != life:
            return
        line.error = error
        line.health.handle(Event.FAILED, life)
        line.count(-line.samples)
        line.tokens = 0
        line.to_send.clear()
        self._work[at].set()
        for flight in [flight for flight in self._flights.values() if flight.replica == at]:
            del self._flights[flight.request.request_id]
            if flight.attempts < self._max_attempts:
                for again in reissued(flight):
                    self._flights[again.request.request_id] = again
                    self._enqueue(again)
            else:
                fail(flight, error)
        self._flush_soon()

    def _give_up(self, error: BaseException) -> None:
        """No replica is left."""
        for flight in self._flights.values():
            fail(flight, error)
        self._flights.clear()
        self._queue.clear()

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)
