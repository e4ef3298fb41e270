"""The request-level client: one queue in front of all replicas of a rollout engine.

Work goes to the replica with the least outstanding tokens, one request at a time. With several replicas a request is
sent only where a slot is free, so no replica idles while another has a queue. Requests of a lost replica are sent to
another one, where the same seeds give the same tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlsdk.interfaces import FinishReason, GenerationOutput, GenerationRequest
from rlsdk.rollouts.client.concurrency import ConcurrencyMeter
from rlsdk.rollouts.client.flights import Flight, Flights, Kept, SampleSeed, Waiter, fail, reissued
from rlsdk.rollouts.client.health import Event, State
from rlsdk.rollouts.client.partial import joined, unfinished
from rlsdk.rollouts.client.pump import Collected
from rlsdk.rollouts.client.replica_poller import LOOK_S, ReplicaPoller
from rlsdk.rollouts.client.replica_state import NoRestarts, Replica, ReplicaState, Restarts


class GenerationClient:
    """Sends requests and delivers each sample to the coroutine that awaits it. Runs on one event loop, on which `run`
    must be running."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        progress_s: float,
        max_attempts: int = 3,
        adapts: bool = False,
        restarts: Restarts | None = None,
    ) -> None:
        """Does not connect yet.

        Args:
            replicas: at least one.
            progress_s: seconds after which a replica that has work and decodes no token counts as lost.
            max_attempts: number of replicas that may lose a request before it fails.
            adapts: adapt the running samples of each replica to its measured throughput, up to `Replica.max_running`.
            restarts: restarts lost replicas; None: they stay lost.
        """
        self._restarts = restarts or NoRestarts(len(replicas))
        self._states = [
            ReplicaState(replica, health, meter=ConcurrencyMeter(replica.max_running) if adapts else None)
            for replica, health in zip(replicas, self._restarts.health, strict=True)
        ]
        self._pollers = [
            ReplicaPoller(at, state, self, self._restarts, progress_s=progress_s)
            for at, state in enumerate(self._states)
        ]
        self._limits = adapts or len(replicas) > 1
        self._max_attempts = max_attempts
        self._flights = Flights()
        self._names = itertools.count()
        self._flush_is_due = False
        self._sending: set[asyncio.Task[None]] = set()
        self.is_interrupted = False
        """Whether all decoding is paused or about to be."""
        self._halted = False
        self._kept: list[Kept] = []
        self._partial: dict[SampleSeed, GenerationOutput] = {}

    def busy_s(self) -> float:
        """Seconds in which replicas had samples to generate, summed over replicas. Thread-safe."""
        now = time.monotonic()
        return sum(
            state.busy_s + (now - since if (since := state.since) is not None else 0.0) for state in self._states
        )

    def concurrency(self) -> float:
        """Samples that a replica may run concurrently, averaged over live replicas. Thread-safe."""
        limits = [state.limit for state in self._states if state.error is None]
        return sum(limits) / max(len(limits), 1)

    @property
    def num_replicas(self) -> int:
        """Number of replicas, including lost ones."""
        return len(self._states)

    async def interrupt(self) -> None:
        """Pauses all decoding for a weight update; requests are queued until `resume`."""
        self.is_interrupted = True
        await asyncio.gather(*(self._interrupt(at) for at in range(len(self._states))))

    async def resume(self, *, keep_cache: bool) -> None:
        """Resumes what `interrupt` paused; `keep_cache`: keep the KV cache of the older weights."""
        await asyncio.gather(*(self._resume(at, keep_cache) for at in range(len(self._states))))
        for state in self._states:
            state.progress_at = time.monotonic()
        self.is_interrupted = self._halted
        self._flush_soon()

    async def halt(self, timeout_s: float) -> Sequence[Kept]:
        """Stops all decoding permanently. Pending futures are never resolved.

        Args:
            timeout_s: replicas that have not reported their unfinished samples by then are ignored.

        Returns:
            The request and the partial output of each unfinished sample.
        """
        self.is_interrupted = self._halted = True
        end = time.monotonic() + timeout_s
        while time.monotonic() < end and any(state.samples and state.error is None for state in self._states):
            for at, state in enumerate(self._states):
                if (names := self._flights.names_at(at)) and state.error is None:
                    with contextlib.suppress(Exception):  # its own poller detects this
                        await asyncio.wait_for(state.replica.abort(names), end - time.monotonic())
            await asyncio.sleep(LOOK_S / 10)
        return [*self._kept, *self._flights.partial()]

    def continue_from(self, partial: Mapping[SampleSeed, GenerationOutput]) -> None:
        """Sets partial outputs of an earlier process, which samples of later requests continue."""
        self._partial.update(partial)

    async def _resume(self, at: int, keep_cache: bool) -> None:
        state = self._states[at]
        if state.paused and state.error is None:
            life, state.paused = state.life, False
            try:
                await state.replica.resume(keep_cache)
            except Exception as error:
                self.replica_failed(at, life, error)

    async def _interrupt(self, at: int) -> None:
        state = self._states[at]
        while self._sending:  # Sent requests must have arrived: an abort applies only to requests that an engine has.
            await asyncio.wait(set(self._sending))
        life = state.life
        try:
            if state.error is None and state.replica.keeps_unfinished:
                state.paused = True
                await state.replica.pause()
                return
            while state.samples and state.error is None:
                await state.replica.abort(self._flights.names_at(at))
                await asyncio.sleep(LOOK_S / 50)
        except Exception as error:
            self.replica_failed(at, life, error)

    def generate(
        self, request: GenerationRequest, *, priority: int = 0
    ) -> Mapping[int, asyncio.Future[GenerationOutput]]:
        """Queues a request; the result holds a future for each of its samples, by index.

        Args:
            request: with an id that no other unfinished request has.
            priority: lower values go first; equal values in order of arrival.
        """
        loop = asyncio.get_running_loop()
        indices = range(request.first_sample, request.first_sample + request.n)
        futures = {index: loop.create_future() for index in indices}
        self.deliver(request, futures, priority=priority)
        return futures

    def deliver(self, request: GenerationRequest, samples: Mapping[int, Waiter], *, priority: int = 0) -> None:
        """As `generate`, with a given waiter for each sample, by index."""
        indices = sorted(samples)
        flight = Flight(request, priority, dict(samples))
        if self._partial and (partial := self._partial_of(request, indices)):
            for index, output in partial.items():
                self._continue(flight, output, flight.samples.pop(index))
            flights = reissued(flight)
        else:
            flights = [flight]
        for one in flights:
            self._enqueue(one)

    def _partial_of(self, request: GenerationRequest, indices: Sequence[int]) -> dict[int, GenerationOutput]:
        seeds = {index: (request.sampling.seed, index) for index in indices}
        partial = {index: self._partial.pop(seed) for index, seed in seeds.items() if seed in self._partial}
        return {
            index: output
            for index, output in partial.items()
            if len(output.token_ids) < request.sampling.max_tokens and _is_under(request.adapter_version, output)
        }

    async def cancel(self, source: str, timeout_s: float) -> bool:
        """Cancels the requests of a source, and waits until no replica works on them. May be called again.

        Args:
            source: source of their groups (`GroupId.source`).
            timeout_s: longest wait.

        Returns:
            False: a replica still works on them. It stops after its decoding step, at the latest with its last sample.
        """
        end, prefix = time.monotonic() + timeout_s, f"{source}/"
        self._flights.cancel(prefix)
        while time.monotonic() < end:
            left = [self._flights.names_at(at, prefix) for at in range(len(self._states))]
            if not any(left):
                return True
            for state, names in zip(self._states, left, strict=True):
                if names and state.error is None:
                    with contextlib.suppress(Exception):  # its own poller detects this
                        await asyncio.wait_for(state.replica.abort(names), end - time.monotonic())
            await asyncio.sleep(LOOK_S / 50)
        return False

    async def run(self) -> None:
        """Collects from every replica until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            for poller in self._pollers:
                group.create_task(poller.run())

    def abort_all(self) -> None:
        """Aborts all requests: cancels futures and tells replicas to stop."""
        for at, state in enumerate(self._states):
            if names := self._flights.names_at(at):
                self._background(state.replica.abort(names))
        self._flights.cancel_all()

    def _enqueue(self, flight: Flight) -> None:
        self._flights.add(flight)
        self._flush_soon()

    def _flush_soon(self) -> None:
        """Sends the requests of one turn of the event loop as one message per replica."""
        if not self._flush_is_due:
            self._flush_is_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_is_due = False
        if self.is_interrupted:
            return
        errors = [
            state.error for state in self._states if state.error is not None and state.health.state is State.RETIRED
        ]
        if len(errors) == len(self._states):
            self._flights.fail_all(errors[-1])
        while self._flights.are_waiting and (at := self._choose()) is not None:
            self._assign(self._flights.next(), at)
        for at, state in enumerate(self._states):
            if state.to_send:
                requests, state.to_send = state.to_send, []
                self._background(self._send(at, requests))
                self._pollers[at].wake()

    def _choose(self) -> int | None:
        """The replica with the least outstanding tokens among those with a free slot."""
        healthy = [state.error is None and state.health.state is State.HEALTHY for state in self._states]
        alive = [at for at, is_healthy in enumerate(healthy) if is_healthy]
        if self._limits:
            alive = [at for at in alive if self._states[at].samples < self._states[at].limit]
        return min(alive, key=lambda at: (self._states[at].tokens, at), default=None)

    def _assign(self, flight: Flight, at: int) -> None:
        state = self._states[at]
        if not state.samples:
            state.progress_at, state.life = time.monotonic(), state.health.life
        flight.replica = at
        flight.attempts += 1
        state.count(len(flight.samples))
        state.tokens += flight.tokens
        state.to_send.append(flight.request)

    async def _send(self, at: int, requests: Sequence[GenerationRequest]) -> None:
        life = self._states[at].life
        try:
            await self._states[at].replica.submit(requests)
        except Exception as error:
            self.replica_failed(at, life, error)

    # Of `PollerCallbacks`, what `ReplicaPoller` calls:

    def take(self, at: int, collected: Collected) -> None:
        state = self._states[at]
        for output in collected.outputs.unpack():
            self._finish(at, output)
        for lost in collected.lost:
            for name in lost.request_ids:
                self._request_lost(at, name, lost.error)
        state.measure(collected, waiting=self._flights.are_waiting and not self.is_interrupted)
        progress = (collected.num_decoded, state.last_progress[1] + len(collected.outputs))
        if progress != state.last_progress or collected.lost:
            state.last_progress, state.progress_at = progress, time.monotonic()
            state.health.handle(Event.ANSWERED, state.life)
        else:
            self._pollers[at].check_progress()
        if self._flights.are_waiting:
            self._flush_soon()

    def revived(self, at: int) -> None:
        self._flush_soon()

    def replica_failed(self, at: int, life: int, error: BaseException) -> None:
        """Reissues the requests of a lost process to other replicas."""
        state = self._states[at]
        if state.error is not None or state.life != life:
            return
        state.error = error
        state.health.handle(Event.FAILED, life)
        state.count(-state.samples)
        state.tokens = 0
        state.to_send.clear()
        self._pollers[at].wake()
        for flight in self._flights.take_from(at):
            if flight.attempts < self._max_attempts:
                for again in reissued(flight):
                    self._enqueue(again)
            else:
                fail(flight, error)
        self._flush_soon()

    def _finish(self, at: int, output: GenerationOutput) -> None:
        flight = self._flights.get(output.request_id)
        future = flight.samples.pop(output.sample_index, None) if flight is not None else None
        if flight is None or future is None:
            return  # aborted meanwhile, or from a replica that was considered dead
        state = self._states[at]
        state.count(-1)
        state.tokens -= flight.request.sampling.max_tokens - len(flight.request.response_ids)
        if not flight.samples:
            state.tokens -= len(flight.request.prompt_ids)
            self._flights.remove(output.request_id)
        if (partial := flight.partial.get(output.sample_index)) is not None:
            output = joined(partial, output)
        if self._halted and output.finish_reason is FinishReason.ABORT:
            if len(output.token_ids):
                self._kept.append((flight.request, output))
        elif self.is_interrupted and output.finish_reason is FinishReason.ABORT:
            self._continue(flight, output, future)
        elif not future.done():
            future.set_result(output)

    def _continue(self, flight: Flight, output: GenerationOutput, waiter: Waiter) -> None:
        """Queues an interrupted sample again, after the tokens that it has."""
        index = output.sample_index
        name = f"{flight.request.request_id.partition('~')[0]}~s{index}.{next(self._names)}"
        request = replace(unfinished(flight.request, output), request_id=name)
        again = Flight(request, flight.priority, {index: waiter}, attempts=flight.attempts)
        if len(output.token_ids):
            again.partial[index] = output
        self._enqueue(again)

    def _request_lost(self, at: int, name: str, error: BaseException) -> None:
        """Handles a request that an engine refused or dropped; the replica does not count as lost."""
        flight = self._flights.remove(name)
        if flight is not None:
            self._states[at].count(-len(flight.samples))
            self._states[at].tokens -= flight.tokens
            fail(flight, error)

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)


def _is_under(version: int | None, output: GenerationOutput) -> bool:
    """Whether a sample may continue this output: one that names a version is sampled whole under it."""
    return version is None or all(run.version == version for run in output.versions)
