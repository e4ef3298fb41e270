"""Requirements: calls and blocking methods share one event loop fairly, and progress can be observed."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from rlsdk.interfaces import Capability, FinishReason, GenerationOutput, GenerationRequest, RolloutEngine
from rlsdk.testing.rollout.audit import adds_up
from rlsdk.testing.rollout.lab import ATTEMPTS, RolloutLab, collect, pieces, whole_shards
from rlsdk.testing.rollout.outputs import wrong_identities
from rlsdk.testing.rollout.plain_model import PlainModel
from rlsdk.testing.suites.requirements import Measured, requirement

LOOK_S = 0.002
"""Seconds between two readings of the number of decoded tokens."""
NUM_UPDATES = 6
"""Updates in pauses of one call: more than fit a few fixed places."""


class EventLoopRequirements:
    """Mixed into `RolloutConformance`."""

    @requirement("continuous_batching", needs=Capability.ABORT, since=(2, 0))
    def test_continuous_batching(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """A call that begins while another is decoded joins it, and does not wait for its end."""
        long = [lab.ask("long", lab.prompt(5, 52), 2, max_tokens=lab.suite.max_model_tokens - 8)]
        short = [lab.ask("short", lab.prompt(6, 53), 1, max_tokens=2)]

        async def first_done() -> str:
            slow = await lab.under_way(long)
            quick = asyncio.create_task(collect(engine, short))
            await asyncio.wait((slow, quick), return_when=asyncio.FIRST_COMPLETED)
            first = "long" if slow.done() else "short"
            await asyncio.gather(slow, quick)
            return first

        joined = 0
        for _ in range(ATTEMPTS):
            joined += lab.wait(first_done()) == "short"
            if joined:
                break
        measured.at_least("short calls that ended before a long one that had begun", joined, 1)

    @requirement("event_loop", since=(2, 0), basic=True)
    def test_event_loop(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Blocking methods can be called inside the running event loop, between calls of `generate`."""
        request = lab.ask("r", lab.prompt(6, 54), 2, max_tokens=6)

        async def one_after_another() -> list[GenerationOutput]:
            outputs = await collect(engine, [request])
            if lab.spec.takes_weights:
                engine.layout()
                engine.update_weights(whole_shards(lab.base), 0)
            if Capability.SLEEP in lab.spec.capabilities:
                engine.sleep(1)
                engine.wake(("weights",))
                engine.wake(("kv_cache",))
            if Capability.PARTIAL_ROLLOUT in lab.spec.capabilities:
                engine.pause()
                engine.resume()
            if Capability.ABORT in lab.spec.capabilities:
                engine.abort()
            return outputs + await collect(engine, [request])

        outputs = lab.wait(one_after_another())
        measured.equal("samples before and after", len(outputs), 4)
        measured.at_most("largest difference of log-probs", lab.worst([request], outputs), lab.suite.tolerance)

    @requirement("num_decoded", since=(2, 0), basic=True)
    def test_num_decoded(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """`num_decoded` can be read from another thread: it grows while samples run, by at least the number of their
        tokens, and is constant otherwise; it excludes given response tokens, and no update or abort decreases it. (An
        engine that does not count returns None.)"""
        before = engine.num_decoded()
        if before is None:
            measured.record("counts tokens", 0)
            return
        looks: list[int | None] = []
        done = threading.Event()

        def watch() -> None:
            while not done.wait(LOOK_S):
                looks.append(engine.num_decoded())

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            outputs = lab.run([lab.ask("r", lab.prompt(6, 55), 4, max_tokens=100)])
        finally:
            done.set()
            watcher.join()
        counts = [-1 if look is None else look for look in looks]
        made, grown = sum(len(output.token_ids) for output in outputs), (engine.num_decoded() or 0) - before
        measured.none("looks at which there were fewer", [b for a, b in itertools.pairwise([before, *counts]) if b < a])
        measured.at_least("tokens by which it grew, less those that came", grown - made, 0)
        measured.equal("tokens while nothing ran", (engine.num_decoded() or 0) - before, grown)
        midway = sum(before < count < before + made for count in counts)
        measured.at_least("looks at which some had come and not all", midway, 1)
        room = lab.suite.max_model_tokens
        given = lab.ask("r", lab.prompt(6, 55), 4, max_tokens=room // 2 + 10)
        given = replace(given, response_ids=lab.prompt(room // 2, 56))
        before = engine.num_decoded() or 0
        lab.run([given])
        grown = (engine.num_decoded() or 0) - before
        measured.at_most(f"tokens counted, of 40 behind {2 * room} that were given", grown, 40 + room)
        before = engine.num_decoded() or 0
        if Capability.ABORT in lab.spec.capabilities:
            engine.abort()
        if lab.spec.takes_weights:
            engine.update_weights(whole_shards(lab.base), 0)
        measured.at_least("change of the count by an abort and an update", (engine.num_decoded() or 0) - before, 0)

    @requirement("versions.runs", needs=Capability.PARTIAL_ROLLOUT, since=(2, 0))
    def test_versions_runs(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Over many updates in pauses, every token carries the version that sampled it, and the runs cover all tokens,
        even if an update brings back the first weights under their version."""
        first, second = lab.changed(5), lab.changed(6)
        states = {0: lab.base} | {version: (first, second)[version % 2] for version in range(3, 3 + NUM_UPDATES)}
        plain = {id(state): lab.plain.with_state(state) for state in (lab.base, first, second)}
        models = {version: plain[id(state)] for version, state in states.items()}
        requests = [lab.ask(f"r{at}", lab.prompt(5 + 3 * at, 73), 3, max_tokens=100) for at in range(2)]

        async def updated(versions: Sequence[int]) -> list[GenerationOutput]:
            task = await lab.paused_midway(requests)
            for at, version in enumerate(versions):
                if at:
                    await some_tokens_later(changing)
                    changing.pause()
                    await asyncio.sleep(0.1)
                changing.update_weights(iter(pieces(states[version])), version)
                changing.resume()
            return await task

        courses = {"of many versions": [*states][1:], "of the first version again": [3, 0]}
        for name, versions in courses.items():
            outputs, faults = attempt_until(
                partial(_has_runs, 1 + len(versions)), partial(updated, versions), lab, requests, models
            )
            measured.none(f"samples whose runs are not of the weights that they name, {name}", faults)
            measured.at_least(f"most runs of one sample, {name}", max(len(output.versions) for output in outputs), 2)
            lab.restore()

    @requirement("versions.ends", needs=Capability.PARTIAL_ROLLOUT, since=(2, 0))
    def test_versions_ends(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """If a sample continues under newer weights, every token carries the version that sampled it, however the
        sample ends (by its limit, a stop, or an abort while it runs or in another pause)."""
        models = {0: lab.plain, 3: lab.plain.with_state(lab.changed(7))}
        likely = lab.plain.next_logits(lab.prompt(6, 74)).topk(3).indices.tolist()
        requests = [
            lab.ask("length", lab.prompt(5, 74), 2, max_tokens=60),
            lab.ask("stop", lab.prompt(6, 74), 4, max_tokens=100, stop_token_ids=tuple(likely)),
            lab.ask("cut", lab.prompt(7, 74), 2, max_tokens=100),
            lab.ask("cut in a pause", lab.prompt(8, 74), 2, max_tokens=100),
        ]
        aborts = Capability.ABORT in lab.spec.capabilities

        async def updated() -> list[GenerationOutput]:
            task = await lab.paused_midway(requests)
            changing.update_weights(whole_shards(models[3].state), 3)
            changing.resume()
            await some_tokens_later(changing)
            if aborts:
                changing.abort(["cut"])
                await some_tokens_later(changing)
                changing.pause()
                await asyncio.sleep(0.05)
                changing.abort(["cut in a pause"])
                changing.resume()
            return await task

        outputs, faults = attempt_until(
            lambda outputs: not aborts or _num_aborted_of_both(outputs) > 0, updated, lab, requests, models
        )
        measured.none("wrong samples", wrong_identities(requests, outputs))
        measured.none("samples whose runs are not of the weights that they name", faults)
        if aborts:
            measured.at_least("aborted samples of both weights", _num_aborted_of_both(outputs), 1)


def attempt_until(
    is_enough: Callable[[Sequence[GenerationOutput]], bool],
    run: Callable[[], Coroutine[Any, Any, list[GenerationOutput]]],
    lab: RolloutLab,
    requests: Sequence[GenerationRequest],
    models: dict[int, PlainModel],
) -> tuple[list[GenerationOutput], list[str]]:
    """Repeats a call with an update in the middle, each time from the first weights, until its samples suffice or some
    are wrong: an engine that decodes by itself may finish before the update.

    Returns:
        Samples of the last attempt, and the faults of their versions.
    """
    for attempt in range(ATTEMPTS):
        if attempt:
            lab.restore()
        outputs = lab.wait(run())
        faults = [fault for output in outputs if (fault := wrong_runs(lab, requests, output, models))]
        if faults or is_enough(outputs):
            break
    return outputs, faults


def _has_runs(num_runs: int, outputs: Sequence[GenerationOutput]) -> bool:
    """Whether a sample has tokens of so many runs."""
    return any(len(output.versions) == num_runs for output in outputs)


def _num_aborted_of_both(outputs: Sequence[GenerationOutput]) -> int:
    """Number of aborted samples with tokens of two versions."""
    return sum(output.finish_reason is FinishReason.ABORT and len(output.versions) == 2 for output in outputs)


async def some_tokens_later(engine: RolloutEngine) -> None:
    """Waits until a resumed engine has sampled a few tokens, or has sampled none for a second."""
    made = engine.num_decoded()
    if made is None:
        await asyncio.sleep(0.02)  # real time: an engine may resume a little later
        return
    seen, changed = made, time.monotonic()
    while seen <= made + 12 and time.monotonic() < changed + 1.0:
        await asyncio.sleep(0.001)
        if (now := engine.num_decoded() or 0) != seen:
            seen, changed = now, time.monotonic()


def wrong_runs(
    lab: RolloutLab,
    requests: Sequence[GenerationRequest],
    output: GenerationOutput,
    models: dict[int, PlainModel],
) -> str:
    """Describes the fault in the versions of a sample; empty: none."""
    request = next(request for request in requests if request.request_id == output.request_id)
    key, runs = f"{output.request_id}/{output.sample_index}", output.versions
    said = ", ".join(f"{run.num_tokens} of {run.version}" for run in runs)
    if not adds_up(output):
        return f"{key}: runs ({said}) for {len(output.token_ids)} tokens"
    found, start = torch.as_tensor(output.log_probs).double(), 0
    for run in runs:
        if run.version not in models:
            return f"{key}: version {run.version}, which never was"
        here = slice(start, start + run.num_tokens)
        expected = lab.expected(models[run.version], request, output)
        if not bool(((found - expected).abs()[here] <= lab.suite.tolerance).all()):
            return f"{key}: log-probs of other weights in its runs ({said})"
        start += run.num_tokens
    return ""
