"""Requirements: many concurrent requests, some of them aborted or paused."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch

from rlsdk.interfaces import Capability, FinishReason, GenerationOutput, GenerationRequest, RolloutEngine
from rlsdk.testing.rollout.audit import audit
from rlsdk.testing.rollout.lab import ATTEMPTS, RolloutLab, collect, pieces
from rlsdk.testing.rollout.outputs import tokens_of, wrong_identities
from rlsdk.testing.rollout.plain_model import PlainModel
from rlsdk.testing.rollout.requirements.length import every_setting
from rlsdk.testing.suites.requirements import Measured, requirement


class SchedulingRequirements:
    """Mixed into `RolloutConformance`."""

    @requirement("more_than_slots", basic=True)
    def test_more_than_slots(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """With more samples than slots, none is lost, swapped or mixed up with another."""
        count = lab.suite.max_running
        requests = [
            lab.ask(f"r{at}", lab.prompt(3 + at % 7, 30 + at), 2, max_tokens=4 + at % 9, seed=at) for at in range(count)
        ]
        outputs = lab.run(requests)
        measured.none("wrong samples", wrong_identities(requests, outputs))
        measured.record("samples for each slot", len(outputs) / count)
        asked = {request.request_id: request.sampling.max_tokens for request in requests}
        measured.none(
            "samples of another request's length",
            [o.request_id for o in outputs if len(o.token_ids) != asked[o.request_id]],
        )
        measured.at_most("largest difference of log-probs", lab.worst(requests, outputs), lab.suite.tolerance)

    @requirement("concurrent_calls", needs=Capability.ABORT)
    def test_concurrent_calls(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Concurrent calls share the engine, and each gets its own samples, whatever their ids."""
        first = [lab.ask("r", lab.prompt(5, 50), 3, max_tokens=20)]
        second = [lab.ask("r", lab.prompt(9, 51), 2, max_tokens=12)]

        async def both() -> tuple[list[GenerationOutput], list[GenerationOutput]]:
            one, two = (asyncio.create_task(collect(engine, requests)) for requests in (first, second))
            return await one, await two

        for requests, outputs in zip((first, second), lab.wait(both()), strict=True):
            measured.none("wrong samples", wrong_identities(requests, outputs))
            measured.at_most("largest difference of log-probs", lab.worst(requests, outputs), lab.suite.tolerance)

    @requirement("abort", needs=Capability.ABORT, basic=True)
    def test_abort(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Aborted requests yield each sample with the tokens that it has; other requests are not affected, not even
        those with similar ids, and unknown ids are ignored."""
        names = ("a", "b", "b1", "ab", "B")
        requests = [lab.ask(name, lab.prompt(6, 60 + at), 3, max_tokens=100) for at, name in enumerate(names)]
        whole = tokens_of(lab.run(requests))

        async def midway(attempt: int) -> list[GenerationOutput]:
            if attempt < 2:
                task = await lab.under_way(requests)
            else:
                # Engines that had finished by then, or that return samples only when all have ended.
                task = asyncio.create_task(collect(engine, requests))
                for _ in range(2 ** (ATTEMPTS + 1 - attempt)):
                    await asyncio.sleep(0)
            engine.abort(["b", "nobody"])
            return await task

        for attempt in range(ATTEMPTS):
            outputs = lab.wait(midway(attempt))
            measured.none("wrong samples", wrong_identities(requests, outputs))
            aborted = [output for output in outputs if output.finish_reason is FinishReason.ABORT]
            measured.none("others that were aborted", [o.request_id for o in aborted if o.request_id != "b"])
            if len(aborted) == 3 and any(len(output.token_ids) for output in aborted):
                break
        measured.equal("samples that were aborted", len(aborted), 3)
        measured.at_most("tokens of the longest aborted sample", max(len(o.token_ids) for o in aborted), 99)
        measured.at_most("largest difference of log-probs", lab.worst(requests, outputs), lab.suite.tolerance)
        if Capability.SEED in lab.spec.capabilities:
            changed = [key for key, tokens in tokens_of(outputs).items() if whole[key][: len(tokens)] != tokens]
            measured.none("samples that are not the beginning of what they would have been", changed)
        engine.abort()
        short = [lab.ask("b", lab.prompt(4, 63), 2)]
        left = [o for o in lab.run(short) if o.finish_reason is FinishReason.ABORT]
        measured.none("later samples hit by an old abort", left)

    @requirement("pause", needs=Capability.PARTIAL_ROLLOUT, basic=True)
    def test_pause(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """`pause` keeps unfinished requests and `resume` continues them: neither their tokens nor their sampling
        change; a `resume` without a pause has no effect."""
        requests = [lab.ask(f"r{at}", lab.prompt(5 + at, 70), 3, max_tokens=40) for at in range(3)]
        requests += [
            lab.ask(name, lab.prompt(9 + at, 72), 3, max_tokens=50, seed=at, **sampling)
            for at, (name, sampling) in enumerate(every_setting(lab).items())
        ]
        whole = tokens_of(lab.run(requests))

        async def held() -> list[GenerationOutput]:
            task = asyncio.create_task(collect(engine, requests))
            for turn in range(12):
                await asyncio.sleep(0)
                if turn in (3, 6):
                    engine.resume()
            engine.pause()
            await asyncio.sleep(0.05)
            engine.resume()
            return await task

        outputs = lab.wait(held())
        measured.none("wrong samples", audit(lab, requests, outputs)[0])
        if Capability.SEED in lab.spec.capabilities:
            measured.none("samples that a pause changed", [k for k, t in tokens_of(outputs).items() if whole[k] != t])

    @requirement("partial_rollout", needs=Capability.PARTIAL_ROLLOUT, basic=True)
    def test_partial_rollout(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """After an update during a pause, earlier tokens are of the old weights and later ones of the new; versions and
        log-probs agree with that."""
        state = lab.changed(5)
        new = lab.plain.with_state(state)
        # More samples than slots, so that some have begun and some wait.
        requests = [
            lab.ask(f"r{at}", lab.prompt(5 + 3 * at, 71), lab.suite.max_running // 2, max_tokens=40) for at in range(3)
        ]

        async def updated(turns: int) -> list[GenerationOutput]:
            task = asyncio.create_task(collect(changing, requests))
            for _ in range(turns):
                await asyncio.sleep(0)
            changing.pause()
            await asyncio.sleep(0.05)
            changing.update_weights(iter(pieces(state)), 3)
            changing.resume()
            return await task

        for attempt in range(ATTEMPTS):
            if attempt:
                lab.restore()
            outputs = lab.wait(updated(2 ** max(4 - attempt, 0)))
            measured.none("wrong samples", wrong_identities(requests, outputs))
            if any(output.last_policy_version == 3 for output in outputs):
                break
        faults, mixed = check_mixed_versions(lab, requests, outputs, new, 3)
        measured.none("samples whose versions or log-probs are of neither", faults)
        measured.at_least(
            "samples of the new weights at their end", sum(o.last_policy_version == 3 for o in outputs), 1
        )
        measured.record("samples of both weights", mixed)


def check_mixed_versions(
    lab: RolloutLab,
    requests: Sequence[GenerationRequest],
    outputs: Sequence[GenerationOutput],
    new: PlainModel,
    version: int,
) -> tuple[list[str], int]:
    """Checks that samples have tokens of the old weights, then tokens of the new, with the versions to match.

    Returns:
        Faults, and how many samples are of both weights.
    """
    asked = {request.request_id: request for request in requests}
    faults, mixed = [], 0
    for output in outputs:
        request, found = asked[output.request_id], torch.as_tensor(output.log_probs).double()
        key = f"{output.request_id}/{output.sample_index}"
        if not len(found):
            faults.append(f"{key}: no tokens")
            continue
        near_old = (found - lab.expected(lab.plain, request, output)).abs() <= lab.suite.tolerance
        near_new = (found - lab.expected(new, request, output)).abs() <= lab.suite.tolerance
        # The longest prefix that fits the old weights; all later tokens must fit the new.
        old = int(near_old.int().cumprod(0).sum())
        if not bool(near_new[old:].all()):
            faults.append(f"{key}: token {old + int((~near_new[old:]).nonzero()[0])} has a log-prob of neither weights")
            continue
        has_new, has_old = old < len(found), bool((~near_new).any())
        mixed += has_new and has_old
        said = (output.policy_version == version, output.last_policy_version == version)
        # A token whose log-prob fits both weights may be of either.
        if (has_old and said[0]) or (has_new and not said[1]) or (not bool(near_old[0]) and not said[0]):
            faults.append(f"{key}: versions {output.policy_version} to {output.last_policy_version}")
    return faults, mixed
