"""Requirements: pauses, aborts and cancelled calls at moments that implementations often overlook."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import cast

from torch import Tensor

from rlsdk.interfaces import (
    Capability,
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    RolloutEngine,
    VersionRun,
    WeightShard,
    WeightSyncError,
)
from rlsdk.testing.process.resources import cpu_seconds
from rlsdk.testing.rollout.audit import audit
from rlsdk.testing.rollout.lab import RolloutLab, collect, decoded, whole_shards
from rlsdk.testing.rollout.outputs import tokens_of, wrong_identities
from rlsdk.testing.rollout.requests import stop_letters
from rlsdk.testing.rollout.requirements.scheduling import check_mixed_versions
from rlsdk.testing.suites.requirements import Measured, requirement

AT_ONCE_S = 1.0
"""Largest time in seconds of a method that must return immediately, on a machine that is also busy otherwise."""
ALONE_S = 0.1
"""Seconds in which an engine that decodes by itself makes visible progress."""
ENDING_S = 5.0
"""Seconds for aborted samples to be returned."""
PAUSES = 8
"""Pauses of one call."""
STEPS_S = 0.05
"""Most seconds between two of them."""
STEPS_AHEAD = 4
"""Largest number of decoding steps that may end after an abort: those that were running."""


class InterruptionRequirements:
    """Mixed into `RolloutConformance`."""

    @requirement("pause.idle", needs=Capability.PARTIAL_ROLLOUT, since=(2, 0))
    def test_pause_idle(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """An engine that is paused while idle, even twice, holds requests that begin then, accepts an update, and after
        one `resume` serves all of them with the new weights."""
        requests = [lab.ask(f"r{at}", lab.prompt(6 + at, 236), 2, max_tokens=12, seed=at) for at in range(2)]
        state = lab.changed(95)

        async def begun_in_a_pause() -> tuple[list[GenerationOutput], int, bool]:
            changing.pause()
            changing.pause()
            before = changing.num_decoded() or 0
            task = asyncio.create_task(collect(changing, requests))
            await asyncio.sleep(0.15)
            early = (changing.num_decoded() or 0) - before + 10**6 * task.done()
            if not early:
                changing.update_weights(whole_shards(state), 8)
                await asyncio.sleep(0.05)
            changing.resume()
            await asyncio.wait([task], timeout=lab.suite.timeout_s / 2)
            waits = not task.done()
            if waits:
                changing.resume()
            return await task, early, waits

        outputs, early, waits = lab.wait(begun_in_a_pause())
        measured.equal("tokens that came in the pause", early, 0)
        measured.equal("calls that one resume did not continue", waits, 0)
        faults, _ = audit(lab, requests, outputs, lab.plain.with_state(state), version=8)
        measured.none("wrong samples", faults)

    @requirement("pause.same_weights", needs=Capability.PARTIAL_ROLLOUT, since=(2, 0))
    def test_pause_same_weights(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Updates to equal weights in many pauses of a call change only versions: log-probs are those of the weights,
        samples end at their stop tokens and strings, and seeded samples have the same tokens as without them."""
        requests = [lab.ask(f"r{at}", lab.prompt(6 + 30 * at, 237), 3, max_tokens=100, seed=at) for at in range(2)]
        requests.append(lab.ask("filtered", lab.prompt(9, 238), 2, max_tokens=90, top_k=9, temperature=1.4, seed=3))
        few = {"max_tokens": 60, "temperature": 1.4, "stop_token_ids": tuple(range(50, 60))}
        requests.append(lab.ask("stopped", lab.prompt(7, 253), 2 * lab.suite.max_running, seed=4, **few))
        begun = lab.ask("begun", lab.prompt(8, 253), 4, max_tokens=80, seed=5)
        requests.append(replace(begun, response_ids=lab.prompt(9, 254)))
        if Capability.STOP_STRINGS in lab.spec.capabilities:
            strings = {"max_tokens": 60, "stop_strings": stop_letters(lab)[:6]}
            requests.append(lab.ask("texts", lab.prompt(5, 253), 12, seed=6, **strings))
        whole = tokens_of(lab.run(requests))

        async def updated() -> list[GenerationOutput]:
            task = await lab.paused_midway(requests)
            for _ in range(PAUSES):
                changing.update_weights(whole_shards(lab.base), 6)
                changing.resume()
                await decoded(changing, lab.suite.max_running, STEPS_S)
                changing.pause()
                await asyncio.sleep(0.02)
            changing.resume()
            return await task

        outputs = lab.wait(updated())
        last = [output.last_policy_version for output in outputs]
        measured.at_least("samples that ended under the new version", last.count(6), 1)
        strange = [o.versions for o in outputs if [run.version for run in o.versions] not in ([0], [6], [0, 6])]
        measured.none("samples of other versions", strange)
        as_before = [
            replace(output, versions=(VersionRun(version=0, num_tokens=len(output.token_ids)),)) for output in outputs
        ]
        measured.none("wrong samples", audit(lab, requests, as_before)[0])
        if Capability.SEED in lab.spec.capabilities:
            measured.none("samples that it changed", [k for k, t in tokens_of(outputs).items() if whole[k] != t])

    @requirement("pause.updates", needs=Capability.PARTIAL_ROLLOUT, since=(2, 0))
    def test_pause_updates(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """After several updates in one pause, samples continue under the last one, and no token is of another. One of
        the updates may fail, the first version may be used again for other weights, and another request may be aborted
        before them."""
        requests = [lab.ask(f"r{at}", lab.prompt(6 + 30 * at, 250), 3, max_tokens=100, seed=at) for at in range(2)]
        other = lab.ask("other", lab.prompt(6, 252), 2, max_tokens=100)
        states = (lab.changed(106), lab.changed(107))
        for name, versions, fails, aborted in (
            ("two", (5, 6), False, []),
            ("one that failed", (5, 6), True, []),
            ("back", (5, 0), False, []),
            *([("behind an abort", (5, 6), False, [other])] if Capability.ABORT in lab.spec.capabilities else []),
        ):
            outputs = lab.wait(_updated_twice(changing, lab, requests, aborted, states, versions, fails=fails))
            said = {run.version for output in outputs for run in output.versions}
            measured.none(f"versions that sampled nothing, {name}", sorted(said - {0, versions[1]}))
            measured.none(f"wrong samples, {name}", wrong_identities(requests, outputs))
            faults, mixed = check_mixed_versions(lab, requests, outputs, lab.plain.with_state(states[1]), versions[1])
            if versions[1]:
                measured.none(f"samples whose versions or log-probs are of neither, {name}", faults)
                measured.at_least(f"samples of both weights, {name}", mixed, 1)
            lab.restore()

    @requirement("abort.without_weights", needs=Capability.PARTIAL_ROLLOUT, since=(2, 0))
    def test_abort_without_weights(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Samples that are aborted or abandoned in a pause after a failed update end then, with the tokens that they
        have: they cannot be resumed. A complete update is served as usual."""
        requests = [lab.ask(f"r{at}", lab.prompt(6 + at, 251), 3, max_tokens=100, seed=at) for at in range(2)]
        shards = list(whole_shards(lab.changed(108)))
        for way in ("aborted", "left") if Capability.ABORT in lab.spec.capabilities else ("left",):
            outputs, early = lab.wait(_ended_without_weights(changing, lab, requests, shards, way))
            if way == "aborted":
                measured.equal("samples that came in the pause", early, 6)
                ids = [request.request_id for request in requests]
                measured.none("wrong samples", audit(lab, requests, outputs, may_abort=ids)[0])
            lab.restore()
            changing.resume()
            measured.none(f"wrong samples afterwards, {way}", audit(lab, requests, lab.run(requests))[0])

    @requirement("abandoned.paused", needs=Capability.PARTIAL_ROLLOUT, since=(2, 0))
    def test_abandoned_paused(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """A call that is abandoned while the engine is paused is dropped then: none of its tokens are decoded after
        `resume`, it blocks no update, and other calls have all slots."""
        requests = [lab.ask("left", lab.prompt(8, 246), lab.suite.max_running, max_tokens=200)]
        fine = [lab.ask("fine", lab.prompt(7, 247), lab.suite.max_running, max_tokens=20, seed=3)]
        for name, leave in {"cancelled": _cancelled_in_a_pause, "closed": _closed_in_a_pause}.items():
            grown = lab.wait(leave(changing, lab, requests))
            measured.equal(f"tokens decoded for nobody, {name}", grown, 0)
            changing.update_weights(whole_shards(lab.base), 0)
            before = changing.num_decoded() or 0
            outputs = lab.run(fine)
            measured.none(f"wrong samples afterwards, {name}", audit(lab, fine, outputs)[0])
            more = (changing.num_decoded() or 0) - before - sum(len(output.token_ids) for output in outputs)
            measured.at_most(f"tokens of others beside them, {name}", more, 2 * lab.suite.max_running)

    @requirement("abort.versions", needs=Capability.PARTIAL_ROLLOUT, since=(2, 0))
    def test_abort_versions(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """A sample that is aborted after an update and before its first token has the version that would have sampled
        it; a sample with tokens has the versions of its tokens."""
        if Capability.ABORT not in lab.spec.capabilities:
            return measured.record("claims abort", 0)
        requests = [lab.ask("r", lab.prompt(8, 248), 2 * lab.suite.max_running + 3, max_tokens=100)]

        async def aborted() -> list[GenerationOutput]:
            task = await lab.paused_midway(requests)
            changing.update_weights(whole_shards(lab.changed(98)), 9)
            changing.abort()
            await asyncio.sleep(0.05)
            changing.resume()
            return await task

        outputs = lab.wait(aborted())
        measured.none("wrong samples", wrong_identities(requests, outputs))
        said = [(len(o.token_ids), tuple((run.version, run.num_tokens) for run in o.versions)) for o in outputs]
        ended = [o.finish_reason is FinishReason.ABORT for o in outputs]
        empty = [versions for (length, versions), cut in zip(said, ended, strict=True) if cut and not length]
        measured.none("samples without a token of another version", [v for v in empty if v != ((9, 0),)])
        begun = [(n, versions) for (n, versions), cut in zip(said, ended, strict=True) if cut and n]
        measured.none("samples whose tokens are of another version", [v for n, v in begun if v != ((0, n),)])
        measured.at_least("samples without a token", len(empty), 1)
        return None

    @requirement("abort.at_once", needs=Capability.ABORT, since=(2, 0))
    def test_abort_at_once(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """`abort` returns immediately and takes effect before the next decoding step; ids may be any sequence and may
        repeat. In a pause it also ends samples that wait for a slot."""
        room = lab.suite.max_model_tokens
        long = [lab.ask("r", lab.prompt(6, 239), lab.suite.max_running, max_tokens=room - 16)]
        for name, ids in {"all": None, "a tuple": ("r", "r"), "a list": ["nobody", "r"]}.items():
            seconds, alone, behind, outputs = lab.wait(_aborted(engine, long, ids))
            measured.at_most(f"seconds of abort, {name}", seconds, AT_ONCE_S)
            # An engine that decodes by itself may be in the middle of a step; others are not.
            most = STEPS_AHEAD * lab.suite.max_running if alone else 0
            measured.at_most(f"tokens decoded behind it, {name}", behind, most)
            measured.none(f"wrong samples, {name}", audit(lab, long, outputs, may_abort=["r"])[0])
        engine.abort(["later", "r"])
        later = [lab.ask(name, lab.prompt(5, 238), 2, max_tokens=12) for name in ("later", "r")]
        measured.none("wrong samples of requests that began behind it", audit(lab, later, lab.run(later))[0])
        if Capability.PARTIAL_ROLLOUT in lab.spec.capabilities:
            many = [replace(long[0], n=2 * lab.suite.max_running + 3)]
            early, outputs = lab.wait(_aborted_while_paused(engine, many))
            measured.equal("samples that came in the pause", early, many[0].n)
            measured.none("wrong samples, paused", audit(lab, many, outputs, may_abort=["r"])[0])


async def _aborted(
    engine: RolloutEngine, requests: Sequence[GenerationRequest], ids: Sequence[str] | None
) -> tuple[float, bool, int, list[GenerationOutput]]:
    """Seconds that `abort` took, whether the engine decodes by itself, tokens decoded after the abort, samples."""
    task = asyncio.create_task(collect(engine, requests))
    for _ in range(10):
        await asyncio.sleep(0)
    busy = cpu_seconds()
    time.sleep(ALONE_S)  # blocks the event loop: an engine that decodes now does so by itself
    alone = cpu_seconds() - busy > 0.2 * ALONE_S
    before, start = engine.num_decoded() or 0, time.perf_counter()
    engine.abort(ids)
    seconds = time.perf_counter() - start
    outputs = await task
    return seconds, alone, (engine.num_decoded() or 0) - before, outputs


async def _updated_twice(
    engine: RolloutEngine,
    lab: RolloutLab,
    requests: Sequence[GenerationRequest],
    aborted: Sequence[GenerationRequest],
    states: Sequence[Mapping[str, Tensor]],
    versions: Sequence[int],
    *,
    fails: bool,
) -> list[GenerationOutput]:
    """Samples of `requests` that are paused and continue after two updates, of which the first may lack its last
    tensor. The requests `aborted` run beside them, and are aborted in the pause."""
    task = await lab.paused_midway([*requests, *aborted], engine)
    if aborted:
        engine.abort([request.request_id for request in aborted])
    for at, (state, version) in enumerate(zip(states, versions, strict=True)):
        shards = list(whole_shards(state))
        with suppress(WeightSyncError):
            engine.update_weights(iter(shards[:-1] if fails and at == 0 else shards), version)
    engine.resume()
    ended = {request.request_id for request in aborted}
    return [output for output in await task if output.request_id not in ended]


async def _ended_without_weights(
    engine: RolloutEngine,
    lab: RolloutLab,
    requests: Sequence[GenerationRequest],
    shards: Sequence[WeightShard],
    way: str,
) -> tuple[list[GenerationOutput], int]:
    """Samples of a call that is ended in a pause after a failed update, and how many were returned in time."""
    task = await lab.paused_midway(requests, engine)
    with suppress(WeightSyncError):
        engine.update_weights(iter(shards[:-1]), 5)
    if way == "aborted":
        engine.abort()
    else:
        task.cancel()
    done, _ = await asyncio.wait([task], timeout=ENDING_S)
    outputs = task.result() if done and not task.cancelled() else []
    return outputs, len(outputs)


async def _cancelled_in_a_pause(engine: RolloutEngine, lab: RolloutLab, requests: Sequence[GenerationRequest]) -> int:
    """Number of tokens that are decoded for a call that was cancelled in a pause."""
    task = await lab.paused_midway(requests, engine)
    before = engine.num_decoded() or 0
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    engine.resume()
    await asyncio.sleep(0.1)
    return (engine.num_decoded() or 0) - before


async def _closed_in_a_pause(engine: RolloutEngine, lab: RolloutLab, requests: Sequence[GenerationRequest]) -> int:
    """As `_cancelled_in_a_pause`, for a call that its caller closes after its first sample."""
    first = replace(requests[0], request_id="first", n=1, sampling=replace(requests[0].sampling, max_tokens=1))
    stream = cast("AsyncGenerator[GenerationOutput, None]", engine.generate([first, *requests]))
    await anext(stream)
    engine.pause()
    await asyncio.sleep(0.05)
    before = engine.num_decoded() or 0
    await stream.aclose()
    engine.resume()
    await asyncio.sleep(0.1)
    return (engine.num_decoded() or 0) - before


async def _aborted_while_paused(
    engine: RolloutEngine, requests: Sequence[GenerationRequest]
) -> tuple[int, list[GenerationOutput]]:
    """Number of samples that were returned before the engine resumed, and all samples."""
    outputs: list[GenerationOutput] = []

    async def take() -> None:
        async for output in engine.generate(requests):
            outputs.append(output)

    task = asyncio.create_task(take())
    for _ in range(6):
        await asyncio.sleep(0)
    engine.pause()
    await asyncio.sleep(0.05)
    engine.abort()
    for _ in _until(5.0):
        if len(outputs) == requests[0].n:
            break
        await asyncio.sleep(0.02)
    early = len(outputs)
    engine.resume()
    await task
    return early, outputs


def _until(seconds: float) -> Iterator[None]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        yield
