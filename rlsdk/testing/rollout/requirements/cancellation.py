"""Requirements: cancelled, aborted and paused calls leak nothing and block no other call."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from rlsdk.interfaces import Capability, FinishReason, GenerationOutput, GenerationRequest, RolloutEngine
from rlsdk.testing.rollout.abandoned_calls import LEAVING, Leaving, at_once, broken_off, stream_of
from rlsdk.testing.rollout.audit import audit
from rlsdk.testing.rollout.lab import RolloutLab, collect, whole_shards
from rlsdk.testing.rollout.outputs import tokens_of
from rlsdk.testing.suites.requirements import Measured, requirement

STILL_SHARE = 12
"""The engine has one such part of the suite's deadline to stop decoding abandoned calls, and to return aborted
samples."""
LOOK_S = 0.05
"""Seconds between two checks."""


class CancellationRequirements:
    """Mixed into `RolloutConformance`."""

    @requirement("abandoned", since=(2, 0), basic=True)
    def test_abandoned(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """A call that its caller abandons (by closing it, by cancellation, or by never starting it) is dropped: it
        decodes no more tokens, occupies no slot, delays no update, and changes no other call."""
        before = lab.wait(at_once(lab, changing))
        requests = [lab.ask("first", lab.prompt(5, 180), max_tokens=2), *_long(lab, "left", 4)]
        # The other call has a request of the same id: ids are unique within one call only.
        other = lab.ask("left", lab.prompt(7, 181), 3, max_tokens=60, temperature=1.2, seed=5)
        alone = tokens_of(lab.run([other]))
        shared = Capability.ABORT in lab.spec.capabilities
        for name, leave in LEAVING.items():
            outputs = lab.wait(_left_beside(changing, [other] if shared else [], requests, leave))
            measured.none(f"wrong samples of another call, {name}", audit(lab, [other], outputs)[0] if shared else [])
            if shared and Capability.SEED in lab.spec.capabilities:
                changed = [key for key, tokens in tokens_of(outputs).items() if alone[key] != tokens]
                measured.none(f"samples of another call that changed, {name}", changed)
            measured.equal(f"tokens decoded for nobody, {name}", lab.wait(_restless(changing, lab)), 0)
            changing.update_weights(whole_shards(lab.base), 0)
        for _ in range(lab.suite.max_running):
            lab.wait(broken_off(changing, requests))
        faults, _ = audit(lab, requests, lab.run(requests))
        measured.none("wrong samples afterwards", faults)
        if before is not None:
            measured.at_least("samples at once afterwards", lab.wait(at_once(lab, changing)) or 0, 0.9 * before)

    @requirement("abort.slots", needs=Capability.ABORT, since=(2, 0))
    def test_abort_slots(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """However often samples are aborted, by id or all at once, the same number of samples can run concurrently as
        before, and the ids can be used again."""
        before = lab.wait(at_once(lab, engine))
        requests = _long(lab, "r", lab.suite.max_running + 4)
        for turn in range(lab.suite.max_running + 2):
            outputs = lab.wait(_aborted(engine, requests, None if turn % 2 else ["r"], turns=1 + turn % 5))
            faults, _ = audit(lab, requests, outputs, may_abort=["r"])
            measured.none(f"wrong samples, abort {turn}", faults)
        again = [replace(requests[0], n=3, sampling=replace(requests[0].sampling, max_tokens=20))]
        measured.none("wrong samples afterwards", audit(lab, again, lab.run(again))[0])
        if before is not None:
            measured.at_least("samples at once afterwards", lab.wait(at_once(lab, engine)) or 0, 0.9 * before)

    @requirement("abort.exact", needs=Capability.ABORT, since=(2, 0))
    def test_abort_exact(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """`abort` ends exactly the requests that it names: an empty list names none, requests that wait for a slot end
        without a token, calls that have not begun are not affected; any thread may call it."""
        counted = engine.num_decoded()
        running = [lab.ask(f"r{at}", lab.prompt(5 + at, 182), 2, max_tokens=40, seed=at) for at in range(3)]
        # More samples than slots, and one more request that waits behind them.
        waiting = _long(lab, "filling", lab.suite.max_running + 3)
        waiting += [replace(_long(lab, "waiting", 3)[0], prompt_ids=lab.prompt(90, 187))]
        outputs = lab.wait(_aborted(engine, running, (), turns=3))
        measured.none("wrong samples behind an abort of nothing", audit(lab, running, outputs)[0])
        names = ["waiting", "filling"]
        outputs = lab.wait(_aborted(engine, [*running, *waiting], names, turns=3))
        faults, _ = audit(lab, [*running, *waiting], outputs, may_abort=names)
        measured.none("wrong samples beside one that waited", faults)
        ended = [output for output in outputs if output.finish_reason is FinishReason.ABORT]
        measured.equal("samples that were aborted", len(ended), waiting[0].n + waiting[1].n)
        measured.at_least("of them without a token", sum(not len(output.token_ids) for output in ended), 1)
        outputs = lab.wait(_begun_late(engine, running))
        measured.none("wrong samples of a call that began behind an abort", audit(lab, running, outputs)[0])
        long = _long(lab, "r", 3)
        outputs = lab.wait(_aborted_by_thread(engine, long))
        measured.none("wrong samples behind an abort by a thread", audit(lab, long, outputs, may_abort=["r"])[0])
        cut = sum(output.finish_reason is FinishReason.ABORT for output in outputs)
        measured.equal("samples that a thread aborted", cut, 3)
        two = lab.wait(_aborted_both(engine, long))
        both = [output for found in two for output in found]
        measured.equal(
            "samples of two calls with one id that were aborted",
            sum(o.finish_reason is FinishReason.ABORT for o in both),
            6,
        )
        if counted is not None:
            made = sum(len(output.token_ids) for output in both)
            grown = (engine.num_decoded() or 0) - counted
            measured.at_least("tokens by which the count grew, less those of two calls", grown - made, 0)

    @requirement("abort.paused", needs=Capability.PARTIAL_ROLLOUT, since=(2, 0))
    def test_abort_paused(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Samples that are aborted during a pause are returned immediately, with the tokens that they have; the others
        continue after the pause, unchanged. If the pause ends at the same moment, aborted samples end nevertheless."""
        if Capability.ABORT not in lab.spec.capabilities:
            measured.record("claims abort", 0)
            return
        requests = [*_long(lab, "a", 3), replace(_long(lab, "b", 3)[0], prompt_ids=lab.prompt(9, 183))]
        whole = tokens_of(lab.run(requests))
        for names in (["a"], None):
            outputs, early = lab.wait(_aborted_in_a_pause(engine, lab, requests, names))
            ended = names or ["a", "b"]
            faults, _ = audit(lab, requests, outputs, may_abort=ended)
            measured.none(f"wrong samples, {names}", faults)
            measured.equal(f"aborted samples that came in the pause, {names}", early, 3 * len(ended))
            if Capability.SEED in lab.spec.capabilities:
                changed = [key for key, t in tokens_of(outputs).items() if whole[key][: len(t)] != t]
                measured.none("samples that are not the beginning of what they would have been", changed)
        outputs, _ = lab.wait(_aborted_in_a_pause(engine, lab, requests, ["a"], at_once=True))
        went_on = [o for o in outputs if o.request_id == "a" and o.finish_reason is not FinishReason.ABORT]
        measured.equal("aborted samples that a resume right behind it continued", len(went_on), 0)

    @requirement("pause.nothing_decoded", needs=Capability.PARTIAL_ROLLOUT, since=(2, 0))
    def test_pause_nothing_decoded(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """During a pause nothing is decoded, not even for calls that begin then; a second pause has no effect, and one
        `resume` continues everything."""
        engine.resume()
        requests, late = _long(lab, "r", 3), [lab.ask("late", lab.prompt(6, 184), 2, max_tokens=4)]
        shared = Capability.ABORT in lab.spec.capabilities

        async def held() -> tuple[list[GenerationOutput], list[GenerationOutput], int]:
            task = await lab.paused_midway(requests)
            engine.pause()
            joined = asyncio.create_task(collect(engine, late)) if shared else None
            await asyncio.sleep(2 * LOOK_S)
            before = engine.num_decoded() or 0
            await asyncio.sleep(4 * LOOK_S)
            grown = (engine.num_decoded() or 0) - before
            done = joined is not None and joined.done()
            engine.resume()
            engine.resume()
            return await task, await joined if joined is not None else [], grown + 10**6 * done

        outputs, joined, grown = lab.wait(held())
        measured.equal("tokens that came in a pause", grown, 0)
        measured.none("wrong samples", audit(lab, requests, outputs)[0])
        measured.none("wrong samples of a call that began in it", audit(lab, late, joined)[0] if shared else [])
        engine.pause()
        engine.resume()
        measured.none("wrong samples behind a pause of nothing", audit(lab, late, lab.run(late))[0])


def _long(lab: RolloutLab, name: str, n: int) -> list[GenerationRequest]:
    """A request that is long enough to still run when an event happens."""
    length = min(lab.suite.max_model_tokens - 16, 300)
    return [lab.ask(name, lab.prompt(8, 185), n, max_tokens=length, seed=3)]


async def _left_beside(
    engine: RolloutEngine, others: Sequence[GenerationRequest], requests: Sequence[GenerationRequest], leave: Leaving
) -> list[GenerationOutput]:
    """Samples of another call that runs while one is abandoned."""
    task = asyncio.create_task(collect(engine, others)) if others else None
    for _ in range(4):
        await asyncio.sleep(0)
    await leave(engine, requests)
    return await task if task is not None else []


async def _restless(engine: RolloutEngine, lab: RolloutLab) -> int:
    """Number of tokens that are still decoded after a grace period although no caller waits."""
    deadline, before = time.monotonic() + lab.suite.timeout_s / STILL_SHARE, engine.num_decoded() or 0
    while True:
        await asyncio.sleep(LOOK_S)
        now = engine.num_decoded() or 0
        if now == before or time.monotonic() > deadline:
            return now - before
        before = now


async def _aborted(
    engine: RolloutEngine, requests: Sequence[GenerationRequest], names: Sequence[str] | None, *, turns: int
) -> list[GenerationOutput]:
    task = asyncio.create_task(collect(engine, requests))
    for _ in range(turns):
        await asyncio.sleep(0)
    engine.abort(names)
    return await task


async def _begun_late(engine: RolloutEngine, requests: Sequence[GenerationRequest]) -> list[GenerationOutput]:
    stream = stream_of(engine, requests)
    engine.abort()
    return [output async for output in stream]


async def _aborted_by_thread(engine: RolloutEngine, requests: Sequence[GenerationRequest]) -> list[GenerationOutput]:
    task = asyncio.create_task(collect(engine, requests))
    for _ in range(4):
        await asyncio.sleep(0)
    thread = threading.Thread(target=engine.abort)
    thread.start()
    outputs = await task
    thread.join()
    return outputs


async def _aborted_both(
    engine: RolloutEngine, requests: Sequence[GenerationRequest]
) -> tuple[list[GenerationOutput], list[GenerationOutput]]:
    one, two = (asyncio.create_task(collect(engine, requests)) for _ in range(2))
    for _ in range(6):
        await asyncio.sleep(0)
    engine.abort([request.request_id for request in requests])
    return await one, await two


async def _aborted_in_a_pause(
    engine: RolloutEngine,
    lab: RolloutLab,
    requests: Sequence[GenerationRequest],
    names: Sequence[str] | None,
    *,
    at_once: bool = False,
) -> tuple[list[GenerationOutput], int]:
    """All samples, and how many were returned before the engine resumed; `at_once`: it resumes right after the
    abort."""
    outputs: list[GenerationOutput] = []

    async def take() -> None:
        async for output in engine.generate(requests):
            outputs.append(output)

    task = asyncio.create_task(take())
    for _ in range(6):
        await asyncio.sleep(0)
    engine.pause()
    await asyncio.sleep(LOOK_S)
    engine.abort(names)
    wanted = sum(request.n for request in requests if names is None or request.request_id in names)
    deadline = time.monotonic() + lab.suite.timeout_s / STILL_SHARE
    while len(outputs) < wanted and time.monotonic() < deadline and not at_once:
        await asyncio.sleep(LOOK_S)
    early = len(outputs)
    engine.resume()
    await task
    return outputs, early
