"""Requirements: random sequences of calls over the lifetime of an engine, compared with plain torch."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from rlsdk.interfaces import Capability, ConfigError, Head
from rlsdk.testing.suites.requirements import Measured, requirement
from rlsdk.testing.train.call_sequences import export, play, rewrite
from rlsdk.testing.train.cases import EVERYTHING, Case, Driven
from rlsdk.testing.train.lab import VARIANTS, TrainLab, claimed_heads
from rlsdk.testing.train.random_life import EVENTS, OPTIMS, Life, plainly
from rlsdk.testing.train.requirements.parallelism import split_case
from rlsdk.testing.train.requirements.ranks import data_case

MODEL_EVENTS = 11
"""Number of events with each other model."""
MODELS = ("tied", "llama", "qwen3", "capped", "windows", "llama3 positions", "experts", "routed")
"""Models besides the suite's own (`train_lab.VARIANTS`)."""
HEADED = ("tied", "capped", "experts")
"""Models that also learn with a value head."""
FEW_EVENTS = 11
"""Number of events if several processes take part."""
SPLITS = frozenset({Capability.TENSOR_PARALLEL, Capability.PIPELINE_PARALLEL, Capability.CONTEXT_PARALLEL})
LIMITS: tuple[dict[str, Any], ...] = ({"rows": 1}, {"rows": 2, "checkpointing": True}, {"tokens": 40}, {"tokens": 300})


class RandomCallRequirements:
    """Mixed into `TrainConformance`."""

    @requirement("random_calls", since=(2, 0))
    def test_random_calls(self, lab: TrainLab, measured: Measured) -> None:
        """For steps of several calls, skipped steps, objectives that raise, outputs, checkpoints, exports, offloading
        and optimizer resets in random order, all results are plain torch's; also after a checkpoint in another
        engine, and if the model's folder gets other weights once the engine has started."""
        for seed in range(3):
            life = Life.of(lab, seed)
            case = lab.case(optim=OPTIMS[seed % len(OPTIMS)], probe=life.probe(), **LIMITS[seed % len(LIMITS)])
            for name, script in life.scripts().items():
                folder = shutil.copytree(case.model, lab.new_folder("rewritten"), dirs_exist_ok=True)
                found = lab.run(play, replace(case, model=str(folder)), [rewrite(folder), *script])
                lab.lives(measured, [found], plainly(case, script), f"random calls {seed}, {name}")

    @requirement("random_calls.models", since=(2, 0))
    def test_random_calls_models(self, lab: TrainLab, measured: Measured) -> None:
        """For random calls of models of other kinds (tied, capped, windowed, with scaled positions, with experts, or
        with biases of routers), all results are plain torch's; a model may be refused with a ConfigError."""
        for seed, name in enumerate(MODELS, start=60):
            model = lab.variant(name)
            if model is None:
                continue
            size = VARIANTS[name].shape.get("vocab_size", 128)
            life = Life.of(lab, seed, num_events=MODEL_EVENTS, vocabulary=size)
            case = lab.case(model=model, optim=OPTIMS[seed % 2], probe=life.probe(), **LIMITS[seed % len(LIMITS)])
            for part, script in life.scripts().items():
                try:
                    found = lab.run(play, case, script)
                except ConfigError:
                    break
                lab.lives(measured, [found], plainly(case, script), f"{name}, {part}")

    @requirement("random_calls.frozen", since=(2, 0))
    def test_random_calls_frozen(self, lab: TrainLab, measured: Measured) -> None:
        """For random calls of a frozen model, all results are plain torch's, even if its folder gets other weights
        once it has started."""
        life = Life.of(lab, 50, num_events=FEW_EVENTS, frozen=True)
        case, script = lab.case(optim=None, probe=life.probe(), rows=2), life.script
        folder = shutil.copytree(case.model, lab.new_folder("rewritten"), dirs_exist_ok=True)
        found = lab.run(play, replace(case, model=str(folder)), [rewrite(folder), *script])
        lab.lives(measured, [found], plainly(case, script))

    @requirement("random_calls.read_only", since=(2, 0))
    def test_random_calls_read_only(self, lab: TrainLab, measured: Measured) -> None:
        """Random calls that only read, move memory, or save and load between any two calls of a run change nothing, bit
        for bit, and neither do skipped steps, objectives that raise and checkpoints that are refused: for a model in
        bfloat16, alone and on several ranks, one with tied embeddings, with experts and with a head in it, one with
        dropout in its configuration, and one with a head."""
        kinds: dict[str, dict[str, Any]] = {"dropout": {"model": lab.variant("dropout"), "checkpointing": True}}
        if "bfloat16" in lab.spec.dtypes:
            kinds |= {
                "bfloat16": {"dtype": "bfloat16", "rows": 2},
                "bfloat16, tied": {"dtype": "bfloat16", "model": lab.variant("tied")},
                "bfloat16, experts": {"dtype": "bfloat16", "model": lab.variant("experts"), "checkpointing": True},
            }
        if Capability.VALUE_HEAD in lab.spec.capabilities:
            kinds["a head"] = {"head": Head.VALUE, "rows": 1}
            if "bfloat16" in lab.spec.dtypes:
                kinds["bfloat16, a head"] = {"dtype": "bfloat16", "head": Head.VALUE, "rows": 2}
        for seed, (name, fields) in enumerate(kinds.items(), start=70):
            if fields.get("model", "") is None:
                continue
            case = lab.case(optim=EVERYTHING, witness=False, **fields)
            life = Life(lab, random.Random(seed), ("values",) if case.head is Head.VALUE else ("log_probs",))
            alone, disturbed = life.steady()
            try:
                runs = [lab.run(play, case, one) for one in (alone, disturbed)]
            except ConfigError:
                if "experts" not in name:
                    raise
                continue  # an engine may refuse such a model
            _is_unchanged(measured, runs, name)
        if {Capability.DATA_PARALLEL} <= lab.spec.capabilities and "bfloat16" in lab.spec.dtypes:
            case = replace(data_case(lab), steps=(), dtype="bfloat16", optim=EVERYTHING, witness=False)
            for one, other in zip(
                *(lab.play_split(case, script) for script in Life(lab, random.Random(80), split=True).steady()),
                strict=True,
            ):
                _is_unchanged(measured, [one, other], "several ranks")

    @requirement("random_calls.heads", needs=Capability.VALUE_HEAD, since=(2, 0))
    def test_random_calls_heads(self, lab: TrainLab, measured: Measured) -> None:
        """For random calls of value and score models, all results are plain torch's; also of value models with tied
        embeddings, capped logits or experts, which may be refused with a ConfigError."""
        kinds = [(head.value, lab.headed_model, head, (name,)) for head, name in claimed_heads(lab)]
        kinds += [(name, lab.variant(name, head=Head.VALUE) or "", Head.VALUE, ("values",)) for name in HEADED]
        for seed, (kind, model, head, names) in enumerate(kinds, start=20):
            if not model:
                continue
            num_events, size = (
                (MODEL_EVENTS, VARIANTS[kind].shape.get("vocab_size", 128)) if kind in HEADED else (EVENTS, 128)
            )
            life = Life.of(lab, seed, num_events=num_events, names=names, vocabulary=size)
            limit = LIMITS[1 + seed % 2]
            case = lab.case(model=model, head=head, probe=life.probe(), optim=OPTIMS[seed % 2], **limit)
            for name, script in life.scripts().items():
                try:
                    found = lab.run(play, case, script)
                except ConfigError:
                    if kind not in HEADED:
                        raise
                    break
                lab.lives(measured, [found], plainly(case, script), f"random calls of {kind}, {name}")

    @requirement("random_calls.random_weights", needs=Capability.EXPORT, since=(2, 0))
    def test_random_calls_random_weights(self, lab: TrainLab, measured: Measured) -> None:
        """For random calls of a model that is not in its files (random weights, or a head that the checkpoint lacks),
        all results are those of plain torch that starts from its first export."""
        kinds: dict[str, dict[str, Any]] = {"random": {"random": True}}
        kinds |= {f"a new head of {n}": {"head": head, "model": lab.model} for head, n in claimed_heads(lab)}
        for seed, (kind, fields) in enumerate(kinds.items(), start=30):
            names = tuple(name for head, name in claimed_heads(lab) if head is fields.get("head")) or ("log_probs",)
            life, first = Life.of(lab, seed, num_events=FEW_EVENTS, names=names), str(lab.new_folder("fresh"))
            case = lab.case(probe=life.probe(), optim=OPTIMS[seed % 2], rows=2, **fields)
            found = lab.run(play, case, [export(first), *life.script])
            plain = replace(case, model=first, random=False)
            lab.lives(measured, [found], plainly(plain, life.script), kind)

    @requirement("random_calls.ranks", needs=Capability.DATA_PARALLEL, since=(2, 0))
    def test_random_calls_ranks(self, lab: TrainLab, measured: Measured) -> None:
        """For random calls of several ranks with different numbers of rows, or none, all results are plain torch's: for
        the suite's model, one with tied embeddings, two with experts, and one with a head."""
        kinds: dict[str, tuple[str | None, Sequence[str]]] = {"an LM": (lab.model, ("log_probs",))}
        kinds |= {name: (lab.variant(name), ("log_probs",)) for name in ("tied", "experts", "routed")}
        if Capability.VALUE_HEAD in lab.spec.capabilities:
            kinds["a head"] = lab.headed_model, ("values",)
        for seed, (kind, (model, names)) in enumerate(kinds.items(), start=40):
            if model is None:
                continue
            size = VARIANTS[kind].shape.get("vocab_size", 128) if kind in VARIANTS else 128
            life = Life.of(lab, seed, num_events=FEW_EVENTS, vocabulary=size, names=names, split=True)
            head = Head.VALUE if names == ("values",) else Head.LM
            case = replace(data_case(lab), model=model, head=head)
            try:
                self._live_split(lab, measured, case, life, seed, kind)
            except ConfigError:
                measured.record(f"models tried, {kind}", 0)

    @requirement("random_calls.splits", since=(2, 0))
    def test_random_calls_splits(self, lab: TrainLab, measured: Measured) -> None:
        """For random calls of a model that is split over tensors, layers or positions, all results are plain
        torch's."""
        for seed, split in enumerate(sorted(SPLITS & lab.spec.capabilities), start=45):
            life = Life.of(lab, seed, num_events=FEW_EVENTS, split=True)
            self._live_split(lab, measured, split_case(lab, split), life, seed, split.value)

    def _live_split(self, lab: TrainLab, measured: Measured, case: Case, life: Life, seed: int, where: str) -> None:
        """Runs a life on every rank."""
        optim, limit = OPTIMS[seed % len(OPTIMS)], LIMITS[seed % len(LIMITS)]
        case = replace(case, optim=optim, steps=(), probe=life.probe(), **limit)
        for name, script in life.scripts().items():
            lab.lives(measured, lab.play_split(case, script), plainly(case, script), f"{where}, {name}")


def _is_unchanged(measured: Measured, runs: Sequence[Driven], name: str) -> None:
    """Checks that two runs are equal."""
    alone, disturbed = runs
    measured.none(f"faults, {name}", [fault for run in runs for fault in run.faults])
    measured.equal(f"norms that differ, {name}", sum(a != b for a, b in zip(*(r.norms for r in runs), strict=True)), 0)
    losses = ([result.loss for result in run.results] for run in runs)
    measured.equal(f"losses that differ, {name}", sum(a != b for a, b in zip(*losses, strict=True)), 0)
    held = zip(alone.shards, disturbed.shards, strict=True)
    measured.none(f"weights that differ, {name}", [a[0] for a, b in held if not torch.equal(a[2], b[2])])
