"""Requirements: samples that continue after a pause with the KV cache of older weights."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlsdk.interfaces import Capability, GenerationOutput, GenerationRequest, RolloutEngine
from rlsdk.testing.rollout.audit import adds_up, audit
from rlsdk.testing.rollout.lab import ATTEMPTS, RolloutLab, collect, whole_shards
from rlsdk.testing.rollout.outputs import wrong_identities
from rlsdk.testing.rollout.plain_model import PlainModel, contract_log_probs
from rlsdk.testing.rollout.requirements.event_loop import some_tokens_later
from rlsdk.testing.suites.requirements import Measured, requirement


class StaleCacheRequirements:
    """Mixed into `RolloutConformance`."""

    @requirement("stale_cache", needs=Capability.STALE_CACHE, since=(2, 0), basic=True)
    def test_stale_cache(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """`resume(keep_cache=True)` continues paused samples, and no others, with the old KV cache under new weights;
        the next `resume` without it does not."""
        requests = [lab.ask(f"r{at}", lab.prompt(12 + 30 * at, 200), 3, max_tokens=100) for at in range(2)]
        # The same prompts, so that cached results would be found.
        late = [lab.ask(f"late{at}", request.prompt_ids, 2, max_tokens=12) for at, request in enumerate(requests)]
        state = lab.changed(91)
        new = lab.plain.with_state(state)

        async def kept() -> tuple[list[GenerationOutput], list[GenerationOutput]]:
            task = await lab.paused_midway(requests)
            changing.update_weights(whole_shards(state), 5)
            changing.resume(keep_cache=True)
            joined = asyncio.create_task(collect(changing, late))
            return await task, await joined

        outputs, joined = lab.wait(kept())
        measured.none("wrong samples", wrong_identities(requests, outputs))
        faults = [fault for output in outputs if (fault := not_as_kept(lab, requests, output, new))]
        measured.none("samples that did not go on with what they had", faults)
        mixed = sum(len(output.versions) == 2 for output in outputs)
        measured.at_least("samples of both weights", mixed, 1)
        measured.none("wrong samples of a call that joined", audit(lab, late, joined, new, version=5)[0])
        measured.none("wrong samples afterwards", audit(lab, late, lab.run(late), new, version=5)[0])

    @requirement("stale_cache.pauses", needs=Capability.STALE_CACHE, since=(2, 0))
    def test_stale_cache_pauses(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """If samples are paused twice, each `resume` decides separately: after one with `keep_cache`, a plain one
        recomputes the whole KV cache, and the other way round."""
        states = {0: lab.base, 3: lab.changed(92), 4: lab.changed(93)}
        models = {version: lab.plain.with_state(state) for version, state in states.items()}
        requests = [lab.ask(f"r{at}", lab.prompt(12 + 9 * at, 201), 3, max_tokens=100) for at in range(2)]

        async def paused_twice(kept: Sequence[bool]) -> list[GenerationOutput]:
            task = await lab.paused_midway(requests)
            changing.update_weights(whole_shards(states[3]), 3)
            changing.resume(keep_cache=kept[0])
            await some_tokens_later(changing)
            changing.pause()
            await asyncio.sleep(0.1)
            changing.update_weights(whole_shards(states[4]), 4)
            changing.resume(keep_cache=kept[1])
            return await task

        for kept in ((True, False), (False, True)):
            said = " then ".join("kept" if keep else "computed again" for keep in kept)
            keeps = dict(zip((3, 4), kept, strict=True))
            for attempt in range(ATTEMPTS):
                if attempt:
                    lab.restore()
                outputs = lab.wait(paused_twice(kept))
                faults = [fault for one in outputs if (fault := not_as_resumed(lab, requests, one, models, keeps))]
                if faults or any(len(output.versions) == 3 for output in outputs):
                    break
            measured.none(f"wrong samples, {said}", wrong_identities(requests, outputs))
            measured.none(f"samples with other keys and values than they should have, {said}", faults)
            measured.record(f"samples of all three weights, {said}", sum(len(o.versions) == 3 for o in outputs))
            lab.restore()


def not_as_kept(
    lab: RolloutLab, requests: Sequence[GenerationRequest], output: GenerationOutput, new: PlainModel
) -> str:
    """Describes the fault in the log-probs of a sample of two versions; empty: none."""
    request = next(request for request in requests if request.request_id == output.request_id)
    said = f"{output.request_id}/{output.sample_index}"
    if not adds_up(output) or [run.version for run in output.versions] not in ([0], [5], [0, 5]):
        return f"{said}: versions {output.versions}"
    tokens = output.token_ids.tolist()
    old = sum(run.num_tokens for run in output.versions if run.version == 0)
    text = (*request.prompt_ids, *request.response_ids)
    logits = stale_logits(lab.plain, new, text, tokens, old)
    expected = contract_log_probs(logits, request.sampling, lab.kind)[range(len(tokens)), tokens]
    off = (torch.as_tensor(output.log_probs).double() - expected).abs()
    if bool((off <= lab.suite.tolerance).all()):
        return ""
    return f"{said}: log-prob {int(off.argmax())} of {len(tokens)}, {old} of them old, is off by {float(off.max()):.3g}"


def not_as_resumed(
    lab: RolloutLab,
    requests: Sequence[GenerationRequest],
    output: GenerationOutput,
    models: Mapping[int, PlainModel],
    keeps: Mapping[int, bool],
) -> str:
    """Describes the fault in the log-probs of a sample that continued under several weights; empty: none.

    Args:
        models: plain models by version.
        keeps: for each version except the first, whether samples continued with their KV cache.
    """
    request = next(request for request in requests if request.request_id == output.request_id)
    said = f"{output.request_id}/{output.sample_index}"
    versions = [run.version for run in output.versions]
    if not adds_up(output) or not set(versions) <= set(models):
        return f"{said}: versions {output.versions}"
    if versions == [min(models), max(models)]:
        return ""  # no token between two pauses: engines need not have used the weights in between
    row, begin, logits = [*request.prompt_ids, *output.token_ids.tolist()], len(request.prompt_ids) - 1, []
    known, cache = 0, None
    for run in output.versions:
        if cache is None or not keeps.get(run.version, False):
            known, cache = 0, empty_cache(models[run.version])
        end = begin + run.num_tokens
        found: Tensor = (
            models[run.version].model(torch.tensor([row[known:end]]), past_key_values=cache, use_cache=True).logits[0]
        )
        logits.append(found[len(found) - run.num_tokens :].double())
        known = begin = end
    tokens = output.token_ids.tolist()
    expected = contract_log_probs(torch.cat(logits), request.sampling, lab.kind)[range(len(tokens)), tokens]
    off = (torch.as_tensor(output.log_probs).double() - expected).abs()
    if bool((off <= lab.suite.tolerance).all()):
        return ""
    runs = ", ".join(f"{run.num_tokens} of {run.version}" for run in output.versions)
    return f"{said}: log-prob {int(off.argmax())} of {len(tokens)} ({runs}) is off by {float(off.max()):.3g}"


def empty_cache(model: PlainModel) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=model.model.config)


def stale_logits(old: PlainModel, new: PlainModel, prompt: Sequence[int], tokens: Sequence[int], count: int) -> Tensor:
    """`[L, V]` float64: the logits of tokens, of which the first `count` are of the old weights, and the others of the
    new weights with the KV cache of the old.

    The newest token of the old weights is the first that the new ones read.
    """
    if not 0 < count < len(tokens):
        return (old if count else new).logits(prompt, tokens)
    known, row = len(prompt) + count - 1, [*prompt, *tokens]
    cache = empty_cache(old)
    first: Tensor = old.model(torch.tensor([row[:known]]), past_key_values=cache, use_cache=True).logits[0]
    rest: Tensor = new.model(torch.tensor([row[known:-1]]), past_key_values=cache, use_cache=True).logits[0]
    return torch.cat([first[len(prompt) - 1 :], rest]).double()
