"""Requirements: an update is served completely and immediately, and no results of older weights are used again."""

from __future__ import annotations

import asyncio
import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from rlsdk.interfaces import (
    Box,
    Capability,
    GenerationOutput,
    RolloutEngine,
    WeightLayout,
    WeightShard,
    WeightSyncError,
    fingerprint,
)
from rlsdk.testing.process.plain_data import not_plain
from rlsdk.testing.process.resources import handles, settled_handles, tensor_bytes
from rlsdk.testing.rollout.audit import adds_up, audit
from rlsdk.testing.rollout.damaged_updates import DAMAGES, MORE_DAMAGES, Damage
from rlsdk.testing.rollout.draw_statistics import Noise
from rlsdk.testing.rollout.lab import SECOND, RolloutLab, collect, pieces, whole_shards
from rlsdk.testing.rollout.outputs import tokens_of
from rlsdk.testing.rollout.requirements.distribution import in_order, unseeded
from rlsdk.testing.rollout.requirements.scheduling import check_mixed_versions
from rlsdk.testing.suites.requirements import Measured, requirement

MANY = 136
"""Number of concurrent samples of an engine with enough slots: more than the powers of two at which its tables may
end."""
FIRST_CALLS = 3
"""Calls of a replica, without seeds, whose draws are compared with a call of another: its first or second."""


class WeightRequirements:
    """Mixed into `RolloutConformance`."""

    @requirement("layout", basic=True)
    def test_layout(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """`layout` lists every tensor of the checkpoint with its shape, and its boxes cover each exactly once. It is
        plain data."""
        layouts = changing.layout()
        measured.none("layouts that are no plain data", not_plain(list(layouts)))
        held = {meta.name: meta.shape for layout in layouts for meta in layout.tensors}
        expected = {name: tuple(tensor.shape) for name, tensor in lab.base.items()}
        wrong = [name for name in sorted(held.keys() | expected.keys()) if held.get(name) != expected.get(name)]
        measured.none("tensors of another name or shape", wrong)
        sharded = Capability.SHARDED_UPDATE in lab.spec.capabilities
        faults = []
        for layout in layouts:
            boxes: dict[str, list[Box]] = {}
            for name, box in layout.boxes:
                boxes.setdefault(name, []).append(box)
            faults += [f"{name}: boxes overlap" for name, found in boxes.items() if _overlap(found)]
            if not sharded:
                faults += [f"{n}: not one whole box" for n in expected if boxes.get(n) != [Box.whole(expected[n])]]
        elements = sum(box.numel for layout in layouts for _, box in layout.boxes)
        measured.record("elements", elements)
        measured.at_least("share of the model that is asked for", elements / sum(map(math.prod, expected.values())), 1)
        measured.none("boxes that do not tile", faults)
        assert [list(layout.boxes) for layout in layouts] == [list(again.boxes) for again in changing.layout()]

    @requirement("versions", basic=True)
    def test_versions(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Every sample carries the version of the weights that sampled it: 0 at first, then that of the last update."""
        request = lab.ask("r", lab.prompt(5, 80), 2)
        for version in (0, 1, 7):
            if version:
                changing.update_weights(whole_shards(lab.changed(version)), version)
            outputs = lab.run([request])
            said = {run.version for output in outputs for run in output.versions}
            measured.none(f"other versions than {version}", sorted(said - {version}))
            measured.none("samples whose runs do not add up", [o.versions for o in outputs if not adds_up(o)])

    @requirement("update.served", basic=True)
    def test_update_served(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """An update is served completely: every tensor affects log-probs, and the receipt describes the served
        weights."""
        requests = [lab.ask(f"r{at}", lab.prompt(8 + at, 81), 3, max_tokens=20) for at in range(2)]
        state = lab.changed(1)
        receipt = changing.update_weights(whole_shards(state), 1)
        wanted = {name: fingerprint(tensor, Box.whole(tuple(tensor.shape))) for name, tensor in state.items()}
        measured.none("fingerprints that differ", [n for n in wanted if receipt.fingerprints.get(n) != wanted[n]])
        measured.equal("version", receipt.version, 1)
        measured.equal("tensors", receipt.num_tensors, len(state))
        measured.equal("bytes", receipt.num_bytes, sum(t.numel() * t.element_size() for t in state.values()))
        worst = lab.worst(requests, lab.run(requests), lab.plain.with_state(state))
        measured.at_most("largest difference of log-probs", worst, lab.suite.tolerance)

    @requirement("update.each_tensor", basic=True)
    def test_update_each_tensor(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Updates that change a single tensor take effect, for every tensor."""
        stale = []
        state = dict(lab.base)
        for at, name in enumerate(state):
            generator = torch.Generator().manual_seed(at)
            state[name] = state[name] + 0.2 * torch.randn(state[name].shape, generator=generator)
            request = lab.ask("r", lab.prompt(12, 90 + at), 1, max_tokens=3)
            receipt = changing.update_weights(whole_shards(state), at + 1)
            right = lab.plain.with_state(state)
            worst = lab.worst([request], lab.run([request]), right)
            proven = receipt.fingerprints.get(name) == fingerprint(state[name], Box.whole(tuple(state[name].shape)))
            if worst > lab.suite.tolerance or not proven:
                stale.append(f"{name}: log-probs differ by {worst:.2g}, fingerprint {'equal' if proven else 'differs'}")
        measured.record("tensors", len(state))
        measured.none("tensors that were not updated", stale)

    @requirement("update.no_stale_cache", basic=True)
    def test_no_stale_cache(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Nothing that was computed with old weights is used after an update, not even for an earlier prompt."""
        prompt = lab.prompt(64, 82)
        requests = [lab.ask("whole", prompt, 2, max_tokens=8), lab.ask("longer", (*prompt, 9, 10), 2, max_tokens=8)]
        measured.at_most("largest difference before", lab.worst(requests, lab.run(requests)), lab.suite.tolerance)
        state = lab.changed(2)
        changing.update_weights(whole_shards(state), 1)
        worst = lab.worst(requests, lab.run(requests), lab.plain.with_state(state))
        measured.at_most("largest difference after", worst, lab.suite.tolerance)

    @requirement("update.pieces", basic=True)
    def test_update_pieces(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Weights may come in pieces, with names in any order, and in a float dtype other than the served one."""
        request = lab.ask("r", lab.prompt(8, 83), 3, max_tokens=20)
        state = {name: tensor.bfloat16() for name, tensor in lab.changed(3).items()}
        receipt = changing.update_weights(iter(pieces(state)), 1)
        served = {name: tensor.float() for name, tensor in state.items()}
        wanted = {name: fingerprint(tensor, Box.whole(tuple(tensor.shape))) for name, tensor in served.items()}
        measured.none("fingerprints that differ", [n for n in wanted if receipt.fingerprints.get(n) != wanted[n]])
        worst = lab.worst([request], lab.run([request]), lab.plain.with_state(served))
        measured.at_most("largest difference of log-probs", worst, lab.suite.tolerance)

    @requirement("update.failed", basic=True)
    def test_update_failed(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """An incomplete update is a WeightSyncError; afterwards the old version is served completely, or nothing is."""
        self._refused(changing, lab, measured, DAMAGES)

    @requirement("update.damaged", since=(2, 0), basic=True)
    def test_update_damaged(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """An update that is empty, lacks its beginning or a whole tensor, has one piece twice instead of another, or
        has pieces outside their tensor, is a WeightSyncError."""
        self._refused(changing, lab, measured, MORE_DAMAGES)

    def _refused(
        self, changing: RolloutEngine, lab: RolloutLab, measured: Measured, damages: Mapping[str, Damage]
    ) -> None:
        state = lab.changed(4)
        shards = pieces(state)
        request = lab.ask("r", lab.prompt(8, 84), 2, max_tokens=12)
        accepted, mixtures = [], []
        for version, (name, damage) in enumerate(damages.items(), start=1):
            try:
                changing.update_weights(damage(list(shards)), version)
                accepted.append(name)
            except WeightSyncError:
                pass
            with suppress(WeightSyncError):
                outputs = lab.run([request])
                if lab.worst([request], outputs) > lab.suite.tolerance or {o.policy_version for o in outputs} != {0}:
                    mixtures.append(f"after {name}")
            if mixtures:
                break
            lab.restore()
        measured.none("accepted", accepted)
        measured.none("served something that is neither", mixtures)
        changing.update_weights(iter(shards), 9)
        outputs = lab.run([request])
        worst = lab.worst([request], outputs, lab.plain.with_state(state))
        measured.at_most("largest difference after a whole update", worst, lab.suite.tolerance)

    @requirement("update.receipts", since=(2, 0), basic=True)
    def test_update_receipts(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Every receipt describes what arrived and what is served now: for whole tensors, pieces in other dtypes,
        unchanged weights, weights after a failed update, and the first weights again."""
        first, second = lab.changed(55), lab.changed(56)
        half = {name: tensor.bfloat16() for name, tensor in second.items()}
        updates: dict[str, tuple[Mapping[str, Tensor], list[WeightShard]]] = {
            "whole tensors": (first, list(whole_shards(first))),
            "the same again": (first, list(whole_shards(first))),
            "pieces of bfloat16": ({n: t.float() for n, t in half.items()}, pieces(half)),
            "pieces": (second, pieces(second)),
            "the first ones": (lab.base, list(whole_shards(lab.base))),
        }
        for version, (name, (state, shards)) in enumerate(updates.items(), start=11):
            if name == "pieces":
                with suppress(WeightSyncError):
                    changing.update_weights(iter(shards[1:]), 99)
            start = time.perf_counter()
            receipt = changing.update_weights(iter(shards), version)
            elapsed = time.perf_counter() - start
            wanted = {key: fingerprint(t, Box.whole(tuple(t.shape))) for key, t in state.items()}
            said = receipt.fingerprints
            wrong = [key for key in wanted.keys() | said.keys() if said.get(key) != wanted.get(key)]
            measured.none(f"fingerprints that differ, {name}", sorted(wrong))
            measured.equal(f"version, {name}", receipt.version, version)
            measured.equal(f"tensors, {name}", receipt.num_tensors, len(state))
            measured.equal(f"bytes, {name}", receipt.num_bytes, sum(4 * t.numel() for t in state.values()))
            measured.at_least(f"seconds, {name}", receipt.seconds, 0)
            measured.at_most(f"seconds, less those that passed, {name}", receipt.seconds - elapsed, 0.01)

    @requirement("update.one_at_a_time", since=(2, 0))
    def test_update_one_at_a_time(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Items are loaded one by one: each is requested after the previous one was loaded, and an engine does not
        collect copies of all. (Measured only for engines in this process.)"""
        state = lab.changed(57)
        largest = max(tensor.numel() * tensor.element_size() for tensor in state.values())
        grown: list[int] = []
        changing.update_weights(_weighed(whole_shards(state), grown), 14)
        whole = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        measured.record("bytes of the model", whole)
        measured.at_most("bytes that an engine held beside its weights", max(grown), max(3 * largest, whole // 2))

    @requirement("update.busy")
    def test_update_busy(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """An update while samples run is refused with a WeightSyncError, or every sample names its weights
        correctly."""
        state = lab.changed(6)
        requests = [lab.ask(f"r{at}", lab.prompt(6, 85 + at), 3, max_tokens=30) for at in range(2)]

        async def midway() -> tuple[list[GenerationOutput], bool]:
            task = asyncio.create_task(collect(changing, requests))
            for _ in range(6):
                await asyncio.sleep(0)
            try:
                changing.update_weights(whole_shards(state), 4)
                refused = False
            except WeightSyncError:
                refused = True
            with suppress(WeightSyncError):
                return await task, refused
            return [], refused

        outputs, refused = lab.wait(midway())
        measured.record("refused", refused)
        measured.equal("a refusal that took the weights", refused and not outputs, 0)
        new = lab.plain if refused else lab.plain.with_state(state)
        faults, _ = check_mixed_versions(lab, requests, outputs, new, -1 if refused else 4)
        measured.none("samples whose versions or log-probs are of neither", faults)

    @requirement("update.first")
    def test_update_first(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Without `load_weights` no weight file is read, nothing is served before the first update, and this update is
        served then, even if the engine slept, paused or aborted before it. Its layout is the same all the time. Samples
        of seeds do not depend on the seed of the run."""
        bare = lab.scratch.parent / "without-weights"
        shutil.copytree(lab.folder, bare, ignore=shutil.ignore_patterns("*.safetensors*"), dirs_exist_ok=True)
        fresh = lab.start(load_weights=False, folder=bare, **SECOND)
        try:
            request = lab.ask("r", lab.prompt(8, 87), 2, max_tokens=12)
            early: list[GenerationOutput] = []
            with suppress(WeightSyncError):
                early = lab.run([request], fresh)
            measured.none("samples of no weights", early)
            layouts, pauses = list(fresh.layout()), Capability.PARTIAL_ROLLOUT in lab.spec.capabilities
            for at, sleeps in enumerate(((1,), (2,), (1, 2)) if Capability.SLEEP in lab.spec.capabilities else ()):
                if at == 1 and pauses:
                    fresh.pause()
                for level in sleeps:
                    fresh.sleep(level)
                fresh.wake(("weights",))
                _without_weights(fresh, lab, measured, layouts)
                if at == 2:
                    fresh.update_weights(whole_shards(lab.changed(8)), 3)
                fresh.wake(("kv_cache",))
            _without_weights(fresh, lab, measured, layouts)
            if Capability.SLEEP in lab.spec.capabilities:
                if pauses:
                    fresh.resume()
                first = lab.plain.with_state(lab.changed(8))
                faults, _ = audit(lab, [request], lab.run([request], fresh), first, version=3)
                measured.none("wrong samples of weights that came to a sleeping engine", faults)
            fresh.update_weights(whole_shards(lab.base), 4)
            measured.equal("another layout with weights", list(fresh.layout()) != layouts, False)
            lab.first_draws = in_order(lab, unseeded(lab), fresh)
            state = lab.changed(7)
            fresh.update_weights(whole_shards(state), 5)
            outputs = lab.run([request], fresh)
            worst = lab.worst([request], outputs, lab.plain.with_state(state))
            measured.at_most("largest difference of log-probs", worst, lab.suite.tolerance)
            measured.none("other versions than 5", sorted({o.policy_version for o in outputs} - {5}))
            if Capability.SEED in lab.spec.capabilities:
                fresh.update_weights(whole_shards(lab.base), 6)
                here, there = (tokens_of(lab.run([request], one)) for one in (fresh, changing))
                changed = [key for key in here if here[key] != there[key]]
                measured.none("seeded samples that the seed of the run changed", changed)
            if Capability.PARTIAL_ROLLOUT in lab.spec.capabilities:
                fresh.pause()
        finally:
            fresh.close()

    @requirement("replicas", since=(2, 0))
    def test_replicas(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Two replicas have separate weights, versions and random numbers: without seeds their draws are independent,
        with seeds equal. A replica that is closed (asleep, if it can sleep) leaves no thread and no open file."""
        if not lab.first_draws:
            # The third engine of a process must not add to what the second keeps for the life of the process.
            replica = lab.start(**SECOND)
            lab.first_draws = in_order(lab, unseeded(lab), replica)
            replica.close()
        before = handles()
        # It also has another size, which must not affect log-probs or the samples of seeds.
        other = lab.start(max_running=MANY, seed=SECOND["seed"])
        try:
            seeded = [lab.ask(f"r{at}", lab.prompt(6 + at, 157), 4, max_tokens=40, seed=at) for at in range(3)]
            # One of the first calls of each replica, of equal seeds: in one of them counters of calls are equal.
            samples = list(lab.first_draws)
            for _ in range(FIRST_CALLS):
                samples += in_order(lab, unseeded(lab), other)
            samples += in_order(lab, unseeded(lab), changing)
            measured.none("draws that depend on another replica's", Noise.of(samples).faults())
            texts = {tuple(sample.tokens.tolist()) for sample in samples}
            measured.equal("distinct samples without seeds", len(texts), len(samples))
            every, prompt = tuple(range(lab.vocabulary)), lab.prompt(9, 158)
            for how, stops in {"many": (), "many that stop": every[::5]}.items():
                many = [lab.ask(how, prompt, MANY, max_tokens=12, temperature=1.2, stop_token_ids=stops)]
                measured.none(f"wrong samples of {how} at once", audit(lab, many, lab.run(many, other))[0])
            if Capability.SEED in lab.spec.capabilities:
                first, second = (tokens_of(lab.run(seeded, one)) for one in (changing, other))
                measured.none(
                    "seeded samples that another replica changed", [k for k in first if first[k] != second[k]]
                )
            state = lab.changed(31)
            other.update_weights(whole_shards(state), 4)
            measured.none("wrong samples of the one that was left", audit(lab, seeded, lab.run(seeded, changing))[0])
            new = lab.plain.with_state(state)
            faults, _ = audit(lab, seeded, lab.run(seeded, other), new, version=4)
            measured.none("wrong samples of the one that was updated", faults)
            if Capability.SLEEP in lab.spec.capabilities:
                other.sleep(1)
        finally:
            other.close()
        for name, more in settled_handles(before).items():
            measured.at_most(f"{name} that it left", more, 0)
        measured.none("wrong samples after it was closed", audit(lab, seeded, lab.run(seeded, changing))[0])


def _without_weights(
    engine: RolloutEngine, lab: RolloutLab, measured: Measured, layouts: Sequence[WeightLayout]
) -> None:
    """Makes the calls that an engine without weights must accept."""
    if Capability.ABORT in lab.spec.capabilities:
        engine.abort()
        engine.abort(["unknown"])
    measured.none("shares of its KV cache that an idle engine uses", [used for used in [engine.kv_used()] if used])
    measured.none("tokens of an engine without weights", [made for made in [engine.num_decoded()] if made])
    measured.equal("another layout without weights", list(engine.layout()) != list(layouts), False)


def _weighed(shards: Iterator[WeightShard], grown: list[int]) -> Iterator[WeightShard]:
    """The same items; at some of them, records by how much all tensors of this process have grown."""
    items = list(shards)
    before = tensor_bytes()
    for at, item in enumerate(items):
        if at in (len(items) // 2, len(items) - 1):
            grown.append(tensor_bytes() - before)
        yield item


def _overlap(boxes: list[Box]) -> bool:
    return any(a.intersect(b) is not None for at, a in enumerate(boxes) for b in boxes[:at])
