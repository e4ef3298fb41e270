"""Requirements: how many samples run concurrently, the load that an engine reports, and the cost of reading it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from rlsdk.interfaces import Capability, GenerationRequest, RolloutEngine, WeightShard
from rlsdk.testing.rollout.lab import RolloutLab, collect, whole_shards
from rlsdk.testing.suites.requirements import Measured, requirement

LOOK_S = 0.002
"""Seconds between two readings from another thread."""
FULL = 40
"""Tokens of each sample when concurrent samples are counted."""
OVERRUN = 1.5
"""Allowed factor of concurrent samples over `max_running`: an engine that decodes ahead of its caller has started the
next samples when the first one is yielded."""
QUICK_S = 0.02
"""Largest median in seconds of a call that costs almost nothing, on a machine that is also busy otherwise."""
SETTLE_S = 5.0
"""Seconds for an engine with its own processes to report that nothing runs any more."""
BLOCKED_S = 5.0
"""Seconds for an answer while weights are updated."""


class CapacityRequirements:
    """Mixed into `RolloutConformance`."""

    @requirement("max_running", since=(2, 0))
    def test_max_running(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """At most `max_running` samples are decoded concurrently, in one call and over all calls, also after a pause
        with an update."""
        if engine.num_decoded() is None:
            return measured.record("counts tokens", 0)
        slots = lab.suite.max_running
        calls = {"one call": [4 * slots]}
        if Capability.ABORT in lab.spec.capabilities:
            calls["three calls"] = [slots, slots, 2 * slots]
        for name, sizes in calls.items():
            requests = [[lab.ask("r", lab.prompt(6, 210 + at), n, max_tokens=FULL)] for at, n in enumerate(sizes)]
            together = lab.wait(running_together(engine, requests))
            measured.at_most(f"samples at once, {name}", together, OVERRUN * slots)
        if Capability.PARTIAL_ROLLOUT in lab.spec.capabilities:
            request = lab.ask("r", lab.prompt(6, 213), 4 * slots, max_tokens=FULL)
            together, before = lab.wait(_running_behind_a_pause(engine, lab, request))
            # Samples from before the pause may wait while others run.
            measured.at_most("samples at once, behind a pause", together, OVERRUN * slots + before)
        return None

    @requirement("num_decoded.exact", since=(2, 0))
    def test_num_decoded_exact(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """`num_decoded` counts sampled tokens, each exactly once, and no tokens of the prompt, whatever its length."""
        if engine.num_decoded() is None:
            return measured.record("counts tokens", 0)
        room = lab.suite.max_model_tokens
        kinds = {
            "long prompts": [lab.ask("r", lab.prompt(room - 60, 214), 4, max_tokens=12)],
            "many samples": [lab.ask("r", lab.prompt(6, 215), 3 * lab.suite.max_running, max_tokens=6)],
            "greedy": [lab.ask("r", lab.prompt(6, 216), 3, max_tokens=40, temperature=0.0)],
            "one token": [lab.ask(f"r{at}", lab.prompt(6, 217 + at), 2, max_tokens=1) for at in range(6)],
            # One sample ends early and others run long: the tokens of an ended sample must not be counted again.
            "unlike lengths": [
                lab.ask(f"r{at}", lab.prompt(6 + at, 224), 1, max_tokens=length)
                for at, length in enumerate((2, 80, 100, 80, 100, 80, 100, 80, 100, 100))
            ],
        }
        for name, requests in kinds.items():
            before = engine.num_decoded() or 0
            made = sum(len(output.token_ids) for output in lab.run(requests))
            grown = (engine.num_decoded() or 0) - before
            measured.at_least(f"tokens counted, less those that came, {name}", grown - made, 0)
            # An engine that decodes ahead has sampled one or two more tokens of each sample than it returns.
            ahead = 2 * sum(request.n for request in requests)
            measured.at_most(f"tokens counted, more than came, {name}", grown - made, ahead)
        return None

    @requirement("kv_used", since=(2, 0))
    def test_kv_used(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """`kv_used` is a share between 0 and 1 that grows with the running samples and is 0 when none runs: after a
        call that ended, was aborted or was abandoned. (An engine that does not know it returns None.)"""
        if engine.kv_used() is None:
            return measured.record("says how full it is", 0)
        length = min(lab.suite.max_model_tokens - 32, 300)
        many = lab.ask("many", lab.prompt(8, 220), lab.suite.max_running, max_tokens=length)
        few = lab.ask("few", lab.prompt(8, 221), 1, max_tokens=length)
        most: dict[str, float] = {}
        for request in (few, many):
            with watched(engine.kv_used) as looks:
                lab.run([request])
            measured.none(
                "answers that are no share", [x for x in looks if not isinstance(x, float) or not 0 <= x <= 1]
            )
            most[request.request_id] = max(_numbers(looks))
            measured.equal(f"share behind {request.request_id}", lab.wait(_settled(engine)), 0.0)
        measured.record("share that many held", most["many"])
        measured.at_least("share that many held, of that of one", most["many"] / max(most["few"], 1e-12), 2)
        with watched(engine.kv_used) as looks:
            lab.run([replace(many, n=4 * many.n)])
        measured.none("answers that are no share, crowded", [x for x in looks if not isinstance(x, float) or x > 1])
        crowded = max(_numbers(looks))
        measured.at_most("share of four times as many, of whom three parts wait", crowded, 1.5 * most["many"])
        if Capability.ABORT in lab.spec.capabilities:
            lab.wait(_aborted(engine, [many]))
            measured.equal("share behind an abort", lab.wait(_settled(engine)), 0.0)
        lab.wait(_cancelled(engine, [many]))
        measured.equal("share behind a call that was left", lab.wait(_settled(engine)), 0.0)
        return None

    @requirement("polling_is_cheap", since=(2, 0))
    def test_polling_is_cheap(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """`num_decoded` and `kv_used` return immediately from any thread, while samples run and during an update."""
        request = lab.ask("r", lab.prompt(8, 222), lab.suite.max_running, max_tokens=60)
        for name, ask in (("num_decoded", changing.num_decoded), ("kv_used", changing.kv_used)):
            times: list[float] = []
            with watched(lambda ask=ask, times=times: _timed(ask, times)):  # type: ignore[misc]
                lab.run([request])
            measured.at_most(f"median seconds of {name}", sorted(times)[len(times) // 2], QUICK_S)
            late: list[str] = []
            changing.update_weights(_asking(whole_shards(lab.base), ask, late), 0)
            measured.none(f"looks at {name} that an update held up", late)

    @requirement("event_loop.turns", since=(2, 0))
    def test_event_loop_turns(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """`generate` returns to the event loop between decoding steps: other tasks run at every token of a response,
        not only after a whole sample or several steps."""
        tokens = 120
        for name, sampling in {"drawn": {}, "greedy": {"temperature": 0.0}}.items():
            request = lab.ask("r", lab.prompt(8, 223), 2, max_tokens=tokens, **sampling)
            turns = lab.wait(_turns_beside(engine, [request]))
            measured.at_least(f"turns of the event loop over {tokens} tokens, {name}", turns, tokens * 4 // 5)


async def running_together(
    engine: RolloutEngine, calls: Sequence[Sequence[GenerationRequest]], tokens: int = FULL
) -> float:
    """Number of samples that run concurrently: tokens that had been decoded when the first sample of `tokens` tokens
    was returned, divided by `tokens`."""
    before, found = engine.num_decoded() or 0, 0.0

    async def follow(requests: Sequence[GenerationRequest]) -> None:
        nonlocal found
        async for _ in engine.generate(requests):
            found = found or ((engine.num_decoded() or 0) - before) / tokens

    await asyncio.gather(*(follow(requests) for requests in calls))
    return found


async def _running_behind_a_pause(
    engine: RolloutEngine, lab: RolloutLab, request: GenerationRequest
) -> tuple[float, float]:
    """The same for one request, which is paused early, perhaps with an update; and the tokens from before the pause, as
    a number of samples."""
    first, length = engine.num_decoded() or 0, request.sampling.max_tokens
    early = first + lab.suite.max_running * length // 4
    task = asyncio.create_task(running_together(engine, [[request]], length))
    while not task.done() and (engine.num_decoded() or 0) < early:
        await asyncio.sleep(0)
    engine.pause()
    await asyncio.sleep(0.02)
    before = ((engine.num_decoded() or 0) - first) / length
    if lab.spec.takes_weights:
        engine.update_weights(whole_shards(lab.base), 0)
    engine.resume()
    return await task, before


def _numbers(looks: Sequence[object]) -> list[float]:
    return [look for look in looks if isinstance(look, float)]


@contextmanager
def watched(ask: Callable[[], object]) -> Iterator[list[object]]:
    """Calls `ask` repeatedly from another thread, as a host does; yields the list of answers."""
    looks: list[object] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            looks.append(ask())
            done.wait(LOOK_S)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield looks
    finally:
        done.set()
        thread.join()


def _timed(ask: Callable[[], object], times: list[float]) -> object:
    start = time.perf_counter()
    answer = ask()
    times.append(time.perf_counter() - start)
    return answer


def _asking(shards: Iterator[WeightShard], ask: Callable[[], object], late: list[str]) -> Iterator[WeightShard]:
    """The same items; before some of them another thread calls `ask`, which must return before the item is yielded."""
    for at, shard in enumerate(shards):
        if at in (0, 3):
            thread = threading.Thread(target=ask, daemon=True)
            thread.start()
            thread.join(BLOCKED_S)
            late += [f"before item {at}"] if thread.is_alive() else []
        yield shard


async def _settled(engine: RolloutEngine) -> float:
    """`kv_used` once nothing runs; an engine with its own processes may learn this a little later."""
    deadline = time.monotonic() + SETTLE_S
    while (used := engine.kv_used() or 0.0) > 0 and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    return used


async def _aborted(engine: RolloutEngine, requests: Sequence[GenerationRequest]) -> None:
    task = asyncio.create_task(collect(engine, requests))
    for _ in range(8):
        await asyncio.sleep(0)
    engine.abort()
    await task


async def _cancelled(engine: RolloutEngine, requests: Sequence[GenerationRequest]) -> None:
    task = asyncio.create_task(collect(engine, requests))
    for _ in range(8):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _turns_beside(engine: RolloutEngine, requests: Sequence[GenerationRequest]) -> int:
    """How often another task ran until the first sample of a call was returned."""
    turns, counted = 0, 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counter = asyncio.create_task(count())
    try:
        async for _ in engine.generate(requests):
            counted = counted or turns
        return counted
    finally:
        counter.cancel()
