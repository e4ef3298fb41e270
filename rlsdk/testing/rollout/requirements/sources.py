"""Requirements: an update reads all kinds of tensors that a source yields (strided, borrowed, split), when it yields
them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from rlsdk.interfaces import (
    Box,
    Capability,
    GenerationOutput,
    GenerationRequest,
    RlsdkError,
    RolloutEngine,
    WeightShard,
    WeightSyncError,
    fingerprint,
)
from rlsdk.testing.rollout.audit import audit
from rlsdk.testing.rollout.lab import RolloutLab, collect, pieces, whole_shards
from rlsdk.testing.rollout.memory_layouts import MEMORY_LAYOUTS, borrowed, cut_at_random
from rlsdk.testing.rollout.outputs import tokens_of
from rlsdk.testing.rollout.plain_model import PlainModel
from rlsdk.testing.rollout.requirements.scheduling import check_mixed_versions
from rlsdk.testing.suites.requirements import Measured, requirement


class SourceRequirements:
    """Mixed into `RolloutConformance`."""

    @requirement("update.borrowed", since=(2, 0))
    def test_update_borrowed(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """An item belongs to the source again once the next is requested: the engine has read it completely by then,
        even if its memory is overwritten."""
        state = lab.changed(41)
        receipt = changing.update_weights(borrowed(whole_shards(state)), 3)
        _served(lab, measured, state, 3, receipt.fingerprints)
        state = lab.changed(42)
        receipt = changing.update_weights(borrowed(iter(pieces(state))), 4)
        _served(lab, measured, state, 4, receipt.fingerprints)

    @requirement("update.strided", since=(2, 0))
    def test_update_strided(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Items may be split along any dimension, in any order, with any memory layout (transposed, with gaps, inside
        another tensor) and any float dtype."""
        for version, (name, lay) in enumerate(MEMORY_LAYOUTS.items(), start=2):
            state = {key: t.to(lay.dtype).float() for key, t in lab.changed(40 + version).items()}
            receipt = changing.update_weights(cut_at_random(state, lay, version), version)
            _served(lab, measured, state, version, receipt.fingerprints, name)
        # Dtypes may change from item to item.
        dtypes = (torch.bfloat16, torch.float32, torch.float64, torch.float16)
        state = {key: t.to(dtypes[at % 4]).float() for at, (key, t) in enumerate(lab.changed(39).items())}
        mixed = (replace(shard, tensor=shard.tensor.to(dtypes[at % 4])) for at, shard in enumerate(whole_shards(state)))
        receipt = changing.update_weights(mixed, 9)
        _served(lab, measured, state, 9, receipt.fingerprints, "dtypes that change")

    @requirement("update.source_raises", since=(2, 0))
    def test_update_source_raises(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """`update_weights` raises the source's exception; nothing is served then, and the next complete update is
        served, however often that happens."""
        state = lab.changed(51)
        shards = list(whole_shards(state))
        swallowed, served = [], []
        for version, at in enumerate((0, 1, len(shards) // 2, len(shards) - 1, len(shards)), start=1):
            try:
                changing.update_weights(_raises(shards, at), version)
                swallowed.append(f"an error behind {at} items")
            except Exception as error:
                # Unchanged: by its class the caller of the sync distinguishes a lost connection from wrong weights.
                if not (isinstance(error, OSError) and BROKEN in str(error)):
                    swallowed.append(f"an error behind {at} items: {type(error).__name__}: {error}")
            with suppress(WeightSyncError):
                served += lab.run([lab.ask("r", lab.prompt(8, 190))])
            if at % 2:
                lab.restore()
        measured.none("errors that did not come out", swallowed)
        measured.none("samples of half an update", served)
        _served(lab, measured, state, 9, changing.update_weights(whole_shards(state), 9).fingerprints)

    @requirement("update.after_failure", since=(2, 0))
    def test_update_after_failure(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Weights of a failed update do not count for the next: an update that lacks a tensor is refused after it,
        however the first one failed, and only complete updates are served."""
        state = lab.changed(54)
        shards = list(whole_shards(state))
        last = len(shards) - 1
        failing: dict[str, Callable[[], Iterator[WeightShard]]] = {
            "a source that raised half-way": lambda: _raises(shards, len(shards) // 2),
            "a source that raised behind the last": lambda: _raises(shards, len(shards)),
            "an update without its last tensor": lambda: iter(shards[:last]),
            "an update without its first tensor": lambda: iter(shards[1:]),
            "an unknown tensor behind the last": lambda: iter([*shards, replace(shards[0], name="unknown.weight")]),
            "an update that was refused for the same": lambda: iter([*shards[:2], *shards[3:]]),
        }
        accepted, served, version = [], [], 10
        for name, fails in failing.items():
            for lacks in (0, 2, last):
                lacking = [*shards[:lacks], *shards[lacks + 1 :]]
                said = f"an update without {shards[lacks].name!r}, behind {name}"
                for way, what in ((fails(), name), (iter(lacking), said)):
                    version += 1
                    with suppress(WeightSyncError, OSError):
                        changing.update_weights(way, version)
                        accepted.append(what)
            with suppress(WeightSyncError):
                served += lab.run([lab.ask("r", lab.prompt(8, 190))])
            if accepted:
                break
        measured.none("accepted", accepted)
        measured.none("samples of no whole update", served)
        _served(lab, measured, state, 9, changing.update_weights(whole_shards(state), 9).fingerprints)

    @requirement("update.raises_paused", needs=Capability.PARTIAL_ROLLOUT, since=(2, 0))
    def test_update_raises_paused(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Paused samples survive a failed update: after a complete one they continue with its weights."""
        state = lab.changed(52)
        requests = [lab.ask(f"r{at}", lab.prompt(5 + at, 191), 3, max_tokens=100) for at in range(2)]

        async def failed() -> list[GenerationOutput]:
            task = await lab.paused_midway(requests)
            with suppress(Exception):
                changing.update_weights(_raises(list(whole_shards(lab.changed(53))), 3), 5)
            changing.update_weights(whole_shards(state), 6)
            changing.resume()
            return await task

        outputs = lab.wait(failed())
        faults, mixed = check_mixed_versions(lab, requests, outputs, lab.plain.with_state(state), 6)
        measured.none("samples whose versions or log-probs are of neither", faults)
        measured.at_least("samples of both weights", mixed, 1)

    @requirement("update.not_finite", since=(2, 0))
    def test_update_not_finite(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Weights that are not finite are refused with a WeightSyncError, or calls that use them end in an RlsdkError:
        no sample is computed from them, even if only one token's embedding is not finite and this token occurs in the
        middle of a response. The next complete update is served as usual, whatever the KV cache contained."""
        late = lab.ask("late", lab.prompt(6, 198), max_tokens=16, temperature=0.0)
        whole = tokens_of(lab.run([late]))["late", 0]
        # A token that first occurs after some others: the tokens that follow it are computed from NaN.
        met = next((at for at in range(3, 15) if whole[at] not in (*late.prompt_ids, *whole[:at])), None)
        if met is not None:
            state = {name: tensor.clone() for name, tensor in lab.base.items()}
            state["model.embed_tokens.weight"][whole[met]] = float("nan")
            beside = [lab.ask(f"r{at}", late.prompt_ids, max_tokens=2, temperature=0.0) for at in range(3)]
            spoilt: list[GenerationOutput] = []
            with suppress(RlsdkError):
                changing.update_weights(whole_shards(state), 7)
                for requests in ([late], [*beside, late]):
                    with suppress(RlsdkError):
                        spoilt += lab.run(requests)
            measured.none(
                "samples that go on behind a token of no number", [o for o in spoilt if o.request_id == "late"]
            )
            lab.restore()
        if "lm_head.weight" in lab.base:
            state = {**lab.base, "lm_head.weight": lab.base["lm_head.weight"].clone()}
            state["lm_head.weight"][11] = float("nan")
            masked: list[GenerationOutput] = []
            with suppress(RlsdkError):
                changing.update_weights(whole_shards(state), 8)
                masked = lab.run([lab.ask("r", lab.prompt(7, 192), 2)])
            measured.none("samples where one logit is no number", masked)
            if Capability.ABORT in lab.spec.capabilities:
                with suppress(RlsdkError):
                    changing.update_weights(whole_shards(state), 8)
                    for turns in (1, 2, 4):
                        with suppress(RlsdkError):
                            masked += lab.wait(_aborted_soon(changing, lab, turns))
            measured.none("aborted samples where one logit is no number", [o for o in masked if len(o.token_ids)])
            lab.restore()
        for version, value in enumerate((float("nan"), float("inf")), start=1):
            state = {name: tensor.clone() for name, tensor in lab.base.items()}
            for tensor in (state["model.embed_tokens.weight"], *list(state.values())[-1:]):
                tensor.view(-1)[: tensor.numel() // 2] = value
            given: list[GenerationOutput] = []
            with suppress(RlsdkError):
                changing.update_weights(whole_shards(state), version)
                given = lab.run([lab.ask(f"r{at}", lab.prompt(5 + at, 192), 2) for at in range(2)])
            for request in (
                lab.ask("greedy", lab.prompt(5, 192), 2, temperature=0.0),
                lab.ask("top-k 1", lab.prompt(5, 192), 2, top_k=1),
            ):
                with suppress(RlsdkError):
                    given += lab.run([request])
            # Fills the KV cache with values that are not finite, in the slots and positions that later calls use.
            for lengths in ((140,) * 8, (1, 51, 101, 151)):
                with suppress(RlsdkError):
                    given += lab.run([lab.ask(f"r{at}", lab.prompt(num, 191), 2) for at, num in enumerate(lengths)])
            measured.none(f"samples of weights with {value}", given)
            lab.restore()
            requests = [lab.ask(f"r{at}", lab.prompt(1 + 40 * at, 193), 2, max_tokens=12) for at in range(4)]
            measured.none("wrong samples afterwards", audit(lab, requests, lab.run(requests))[0])

    @requirement("update.versions", since=(2, 0))
    def test_update_versions(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """A version is only a name: a repeated, a lower and a large one serve the weights that came with them."""
        requests = [lab.ask(f"r{at}", lab.prompt(6 + at, 194), 2, max_tokens=8) for at in range(2)]
        for turn, version in enumerate((3, 3, 1, 2**40, 0, 3)):
            state = lab.changed(60 + turn)
            receipt = changing.update_weights(whole_shards(state), version)
            measured.equal(f"version of receipt {turn}", receipt.version, version)
            plain = lab.plain.with_state(state)
            faults, _ = audit(lab, requests, lab.run(requests), plain, version=version)
            measured.none(f"wrong samples of update {turn}, version {version}", faults)

    @requirement("update.nothing_cached", since=(2, 0))
    def test_update_nothing_cached(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Nothing is cached over an update: for prompts of any length, greedy or drawn, new or continued, alone or
        together; not even if the first weights come back."""
        requests = list(_remembered(lab))
        states: list[Mapping[str, Tensor]] = [lab.base, lab.changed(71), lab.changed(72), lab.base]
        for version, state in enumerate(states):
            plain = lab.plain if state is lab.base else lab.plain.with_state(state)
            if version:
                changing.update_weights(whole_shards(state), version)
            faults, _ = audit(lab, requests, lab.run(requests), plain, version=version)
            measured.none(f"wrong samples of version {version}", faults)
            seeded = [request for request in requests if request.sampling.seed is not None]
            if version == 0:
                first = tokens_of(lab.run(seeded))
        if Capability.SEED in lab.spec.capabilities:
            last = tokens_of(lab.run(seeded))
            measured.none("samples that the same weights did not give again", [k for k in first if last[k] != first[k]])


async def _aborted_soon(engine: RolloutEngine, lab: RolloutLab, turns: int) -> list[GenerationOutput]:
    """Samples of a long call that is aborted after a few turns of the event loop."""
    request = lab.ask("r", lab.prompt(7, 192), 2, max_tokens=60)
    task = asyncio.create_task(collect(engine, [request]))
    for _ in range(turns):
        await asyncio.sleep(0)
    engine.abort()
    return await task


BROKEN = "the source has broken off"


def _raises(shards: list[WeightShard], at: int) -> Iterator[WeightShard]:
    yield from shards[:at]
    raise OSError(BROKEN)


def _served(
    lab: RolloutLab,
    measured: Measured,
    state: Mapping[str, Tensor],
    version: int,
    fingerprints: Mapping[str, int],
    name: str = "",
) -> None:
    """Checks that these weights are served now."""
    said = f", {name}" if name else ""
    wanted = {key: fingerprint(t, Box.whole(tuple(t.shape))) for key, t in state.items()}
    measured.none(f"fingerprints that differ{said}", [key for key in wanted if fingerprints.get(key) != wanted[key]])
    requests = [lab.ask(f"r{at}", lab.prompt(6 + 9 * at, 195), 2, max_tokens=10) for at in range(2)]
    plain = PlainModel.with_state(lab.plain, state)
    faults, _ = audit(lab, requests, lab.run(requests), plain, version=version)
    measured.none(f"wrong samples{said}", faults)


def _remembered(lab: RolloutLab) -> Iterator[GenerationRequest]:
    """Requests whose results an engine could cache."""
    for at, length in enumerate((1, 5, 16, 33, 64, 150, lab.suite.max_model_tokens - 30)):
        if length > 0:
            prompt = lab.prompt(length, 196)
            yield lab.ask(f"drawn {length}", prompt, 2, max_tokens=5, seed=at)
            yield lab.ask(f"greedy {length}", prompt, 2, max_tokens=5, temperature=0.0)
            given = lab.prompt(20, 197)
            yield replace(lab.ask(f"continued {length}", prompt, max_tokens=24, seed=at), response_ids=given)
