"""Requirements: requests of every kind during aborts, pauses and updates."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rlsdk.interfaces import Capability, FinishReason, GenerationOutput, GenerationRequest, RolloutEngine
from rlsdk.testing.rollout.audit import BORDER, audit
from rlsdk.testing.rollout.lab import RolloutLab, collect, pieces, whole_shards
from rlsdk.testing.rollout.outputs import tokens_of, wrong_identities
from rlsdk.testing.rollout.plain_model import PlainModel, kept
from rlsdk.testing.rollout.requirements.scheduling import check_mixed_versions
from rlsdk.testing.rollout.requirements.stale_cache import not_as_kept
from rlsdk.testing.suites.requirements import Measured, requirement

LONG = 70
"""New tokens of each sample."""


class EventRequirements:
    """Mixed into `RolloutConformance`."""

    @requirement("events.abort", needs=Capability.ABORT, since=(2, 0))
    def test_events_abort(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Requests of every kind are aborted early and late, some or all: each sample is returned once, with its own
        number and the tokens that it has; the other samples do not change."""
        requests = list(of_every_kind(lab))
        whole = tokens_of(lab.run(requests))
        some = [request.request_id for request in requests[::2]]
        for turns in (1, 4, 20):
            for names in (some, None):
                outputs = lab.wait(_aborted(engine, requests, names, turns))
                where = f"{'some' if names else 'all'} behind {turns} turns"
                ended = names or [request.request_id for request in requests]
                measured.none(f"wrong samples, {where}", audit(lab, requests, outputs, may_abort=ended)[0])
                if Capability.SEED in lab.spec.capabilities:
                    changed = [key for key, tokens in tokens_of(outputs).items() if whole[key][: len(tokens)] != tokens]
                    measured.none(f"samples that are not the beginning of what they would have been, {where}", changed)
        aborted = sum(output.finish_reason is FinishReason.ABORT for output in outputs)
        measured.at_least("samples that the last one ended", aborted, 1)

    @requirement("events.pause", needs=Capability.PARTIAL_ROLLOUT, since=(2, 0))
    def test_events_pause(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Two pauses during requests of every kind change no sample."""
        for name, requests in crowds(lab).items():
            whole = tokens_of(lab.run(requests))
            outputs = lab.wait(_held_twice(engine, lab, requests))
            measured.none(f"wrong samples, {name}", audit(lab, requests, outputs)[0])
            if Capability.SEED in lab.spec.capabilities:
                changed = [key for key, tokens in tokens_of(outputs).items() if whole[key] != tokens]
                measured.none(f"samples that a pause changed, {name}", changed)

    @requirement("events.update", needs=Capability.PARTIAL_ROLLOUT, since=(2, 0))
    def test_events_update(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Requests of every kind continue under newer weights, including those with given tokens and those that had not
        begun: log-probs, versions and filters of each token are those of the weights that sampled it."""
        state = lab.changed(96)
        new = lab.plain.with_state(state)

        async def updated(requests: Sequence[GenerationRequest]) -> list[GenerationOutput]:
            task = await lab.paused_midway(requests)
            changing.update_weights(iter(pieces(state)), 9)
            changing.resume()
            return await task

        for name, requests in crowds(lab).items():
            outputs = lab.wait(updated(requests))
            measured.none(f"wrong samples, {name}", wrong_identities(requests, outputs))
            faults, mixed = check_mixed_versions(lab, requests, outputs, new, 9)
            measured.none(f"samples whose versions or log-probs are of neither, {name}", faults)
            measured.at_least(f"samples of both weights, {name}", mixed, 1)
            measured.none(f"tokens that filters leave out, {name}", list(undrawn(lab, requests, outputs, new)))
            lab.restore()

    @requirement("events.keep_cache", needs=Capability.STALE_CACHE, since=(2, 0))
    def test_events_keep_cache(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """With `resume(keep_cache=True)` requests of every kind continue with their KV cache; a sample that had not
        begun has none, and uses no other sample's, even of the same prompt or request."""
        state = lab.changed(97)
        new = lab.plain.with_state(state)

        async def kept_on(requests: Sequence[GenerationRequest]) -> list[GenerationOutput]:
            task = await lab.paused_midway(requests)
            changing.update_weights(whole_shards(state), 5)
            changing.resume(keep_cache=True)
            return await task

        for name, requests in crowds(lab).items():
            outputs = lab.wait(kept_on(requests))
            measured.none(f"wrong samples, {name}", wrong_identities(requests, outputs))
            faults = [fault for output in outputs if (fault := not_as_kept(lab, requests, output, new))]
            measured.none(f"samples that did not go on with what they had, {name}", faults)
            both = sum(len(output.versions) == 2 for output in outputs)
            measured.at_least(f"samples of both weights, {name}", both, 1)
            lab.restore()


def crowds(lab: RolloutLab) -> dict[str, list[GenerationRequest]]:
    """Requests of every kind: one sample of each, so that all run concurrently, and so many that some must wait."""
    every = list(of_every_kind(lab))
    few = [replace(request, n=1) for request in every if request.n <= lab.suite.max_running]
    return {"at once": few[: max(lab.suite.max_running - 1, 1)], "many": every}


def of_every_kind(lab: RolloutLab) -> Iterator[GenerationRequest]:
    """Requests that differ in all state that an engine keeps of a running request; more samples than slots."""
    given = lab.prompt(40, 260)

    def ask(name: str, length: int, n: int = 2, **sampling: object) -> GenerationRequest:
        return lab.ask(name, lab.prompt(length, 261), n, **{"max_tokens": LONG, **sampling})

    def behind(request: GenerationRequest, tokens: Sequence[int]) -> GenerationRequest:
        more = replace(request.sampling, max_tokens=request.sampling.max_tokens + len(tokens))
        return replace(request, response_ids=tuple(tokens), sampling=more)

    yield ask("plain", 6)
    yield behind(ask("continued", 9), given)
    yield replace(ask("numbered", 7, seed=4), first_sample=5)
    yield ask("filtered", 8, top_k=7, top_p=0.9, temperature=1.3, seed=5)
    yield replace(behind(ask("all at once", 11, top_k=9, temperature=1.2, seed=6), given[:17]), first_sample=3)
    yield ask("greedy", 5, temperature=0.0)
    yield behind(ask("greedy, continued", 5, temperature=0.0), given[:9])
    yield ask("hot", 6, temperature=1.8, seed=7)
    yield ask("long prompt", min(200, lab.suite.max_model_tokens // 2), seed=8)
    yield ask("short", 12, 3, max_tokens=4, seed=9)
    rare = int(lab.plain.next_logits(lab.prompt(6, 261)).argmin())
    yield ask("stops", 6, stop_token_ids=(rare,), seed=10)
    if Capability.MIN_P in lab.spec.capabilities:
        yield ask("min-p", 6, min_p=0.1, temperature=1.4, seed=11)
    if Capability.STOP_STRINGS in lab.spec.capabilities:
        yield ask("stop strings", 6, stop_strings=("a string that never comes",), seed=12)
    # More samples of one prompt than slots: some begin after the event.
    yield replace(ask("many", 6, lab.suite.max_running + 4, seed=13), first_sample=2)
    yield behind(replace(ask("the last ones", 10, 6, seed=14), first_sample=1), given[:5])


def undrawn(
    lab: RolloutLab, requests: Sequence[GenerationRequest], outputs: Sequence[GenerationOutput], new: PlainModel
) -> Iterator[str]:
    """Tokens that could not have been drawn with the weights of their version."""
    asked = {request.request_id: request for request in requests}
    for output in outputs:
        request, tokens = asked[output.request_id], output.token_ids.tolist()
        if request.sampling.temperature == 0 or not tokens:
            continue
        text, first = (*request.prompt_ids, *request.response_ids), output.versions[0]
        old = first.num_tokens if first.version == 0 else 0
        logits = (model.logits(text, tokens) / request.sampling.temperature for model in (lab.plain, new))
        allowed = [kept(values.softmax(-1), request.sampling, BORDER) for values in logits]
        for at, token in enumerate(tokens):
            if not bool(allowed[at >= old][at, token]):
                yield f"{output.request_id}/{output.sample_index}: token {at} of {len(tokens)}"


async def _aborted(
    engine: RolloutEngine, requests: Sequence[GenerationRequest], names: Sequence[str] | None, turns: int
) -> list[GenerationOutput]:
    task = asyncio.create_task(collect(engine, requests))
    for _ in range(turns):
        await asyncio.sleep(0)
    engine.abort(names)
    return await task


async def _held_twice(
    engine: RolloutEngine, lab: RolloutLab, requests: Sequence[GenerationRequest]
) -> list[GenerationOutput]:
    task = await lab.paused_midway(requests, engine)
    engine.resume()
    for _ in range(5):
        await asyncio.sleep(0)
    engine.pause()
    await asyncio.sleep(0.05)
    engine.resume()
    return await task
