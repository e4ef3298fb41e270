"""Requirements: random sequences of calls over the lifetime of an engine, compared with plain torch."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rlsdk.interfaces import Batch, Capability, CheckpointError, ConfigError, Head
from rlsdk.kit.memory.memory_parts import TRAIN_PARTS
from rlsdk.testing.suites.requirements import Measured, requirement
from rlsdk.testing.train.call_sequences import (
    Act,
    aside,
    export,
    learn,
    learn_nothing,
    load,
    look,
    look_twice,
    offload,
    onload,
    play,
    read,
    refused,
    reset,
    rewrite,
    save,
    save_in_a_sync,
    see_layout,
    skip,
    step,
)
from rlsdk.testing.train.case_runner import record_final_state
from rlsdk.testing.train.cases import OPTIM, Case, Driven, Weighted, rows_of
from rlsdk.testing.train.lab import VARIANTS, TrainLab, claimed_heads
from rlsdk.testing.train.objectives import Raising, Reporting, Unfit
from rlsdk.testing.train.plain_engine import PlainTrainEngine
from rlsdk.testing.train.requirements.parallelism import split_case
from rlsdk.testing.train.requirements.ranks import data_case
from rlsdk.testing.train.requirements.settings import EVERYTHING, SETTINGS

EVENTS = 22
"""Number of events in one life; each is one call or a few."""
MODEL_EVENTS = 11
"""Number of events with each other model."""
MODELS = ("tied", "llama", "qwen3", "capped", "windows", "llama3 positions", "experts", "routed")
"""Models besides the suite's own (`train_lab.VARIANTS`)."""
HEADED = ("tied", "capped", "experts")
"""Models that also learn with a value head."""
FEW_EVENTS = 11
"""Number of events if several processes take part."""
SPLITS = frozenset({Capability.TENSOR_PARALLEL, Capability.PIPELINE_PARALLEL, Capability.CONTEXT_PARALLEL})
MOST_STEPS = 7
LENGTHS = (1, 1, 2, 3, 5, 8, 13, 30, 70)
OPTIMS = tuple(
    replace(optim, lr=0.3 * optim.lr)
    for optim in (
        OPTIM,
        EVERYTHING,
        SETTINGS["short memory"],
        replace(OPTIM, max_grad_norm=0.02, schedule="linear", total_steps=9, warmup_steps=2),
    )
)
"""Small steps: rounding of one step grows over seven."""
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


@dataclass(eq=False)
class Life:
    """A random script. It is the same for all engines with the same claims."""

    lab: TrainLab
    source: random.Random
    names: Sequence[str] = ("log_probs",)
    vocabulary: int = 128
    frozen: bool = False
    split: bool = False
    """Several ranks: some may have no rows."""
    script: list[Act] = field(default_factory=list)
    saved: list[tuple[str, int, list[Act]]] = field(default_factory=list)
    """Folders of checkpoints, the length of the script at that time, and a call in place of those whose gradients are
    not in the checkpoint."""
    writing: set[int] = field(default_factory=set)
    """Acts that write into folders."""
    pending: bool = False
    """There may be gradients of an unfinished step."""
    quiet: bool = False
    """Between steps only calls that must not change them."""
    num_steps: int = 0
    num_batches: int = 0

    @classmethod
    def of(cls, lab: TrainLab, seed: int, *, num_events: int = EVENTS, **fields: Any) -> Life:
        """A complete life."""
        life = cls(lab, random.Random(seed), **fields)
        events = list(life._events())
        exports = Capability.EXPORT in lab.spec.capabilities
        life._step()
        if exports:
            life._export()
        order = [*life.source.sample(events, len(events)), *life.source.choices(events, k=num_events)]
        for event in order[: max(num_events, len(events))]:
            event()
        life._step()
        if exports:
            life._export()
        return life

    def probe(self) -> tuple[Batch, tuple[str, ...]]:
        return self._spread(rows_of((12, 1, 5, 3), seed=7)), tuple(self.names)

    def scripts(self) -> dict[str, list[Act]]:
        """The life; and, for another engine, the part after its last checkpoint."""
        found = {"whole": self.script}
        if self.saved:
            folder, at, instead = self.saved[-1]
            rest = [act for i, act in enumerate(self.script) if i >= at and i not in self.writing]
            found["behind a checkpoint"] = [load(folder), *instead, *rest]
        return found

    def steady(self) -> tuple[list[Act], list[Act]]:
        """Steps, and the same steps with other calls in between that must not change them."""
        steps = list[Act]()
        for _ in range(4):
            steps += [learn(self._batch(), Weighted(tuple(self.names))) for _ in range(self.source.randrange(1, 3))]
            steps.append(step)
        self.quiet = True
        for at, act in enumerate(steps):
            for event in self.source.sample(self._reading(), 2):
                event()
            if at and steps[at - 1] is step:
                if self.source.random() < 0.5:
                    self._save()
                    self.script.append(load(self.saved[-1][0]))
                self.source.choice((self._raise, self._skip, self._load_nothing))()
            self.pending = act is not step
            self.script.append(act)
        return steps, self.script

    def _reading(self) -> list[Callable[[], None]]:
        """Events that change nothing, wherever they happen."""
        reading: list[Callable[[], None]] = [self._look, self._look_again, self._read, self._nothing, self._save]
        if Capability.OFFLOAD in self.lab.spec.capabilities:
            reading.append(self._offload)
        if Capability.EXPORT in self.lab.spec.capabilities:
            reading.append(self._export)
        return reading

    def _events(self) -> Iterator[Callable[[], None]]:
        claimed = self.lab.spec.capabilities
        yield from (self._look, self._look_again, self._read)
        if not self.frozen:
            yield from (self._step, self._step, self._save, self._load, self._nothing)
            yield from (self._skip, self._raise, self._load_nothing)
        if Capability.OFFLOAD in claimed:
            yield self._offload
        if Capability.EXPORT in claimed:
            yield self._export
        if self.lab.can_reset and not self.frozen:
            yield self._reset

    def _batch(self) -> Batch:
        self.num_batches += 1
        lengths = self.source.choices(LENGTHS, k=self.source.randrange(2, 9))
        warm = self.source.choice((1.0, 1.0, 0.7, 1.6))
        found = rows_of(lengths, seed=self.num_batches, masked=self.source.random() < 0.4, temperature=warm)
        if self.source.random() < 0.2:
            return self._dressed(found.select(range(1)))
        return self._dressed(found)

    def _dressed(self, batch: Batch) -> Batch:
        """The rows as callers may also give them: in groups that share prefixes, with fields that the engine does not
        know, and not contiguous in memory."""
        ids, start = self._spread(batch)["input_ids"], batch.offsets[:-1]
        if self.source.random() < 0.4:
            # Every second row shares a prefix with the one before, up to all but its last token.
            ids, lengths = ids.clone(), batch.lengths.tolist()
            for at in range(1, batch.num_rows, 2):
                shared = self.source.randrange(1 + max(min(lengths[at], lengths[at - 1]) - 1, 0))
                ids[start[at] : start[at] + shared] = ids[start[at - 1] : start[at - 1] + shared]
            batch = batch.with_rows(uid=torch.arange(batch.num_rows) // 2)
        if self.source.random() < 0.3:
            ids = torch.stack([ids, ids.flip(0)], 1)[:, 0]
            batch = batch.with_tokens(marks=torch.ones(len(ids), 3, dtype=torch.int16))
        return batch.with_tokens(input_ids=ids).with_meta(reporting_row=int(batch["row_id"][0]))

    def _spread(self, batch: Batch) -> Batch:
        """The batch with tokens of the whole vocabulary."""
        return batch.with_tokens(input_ids=batch["input_ids"] * self.vocabulary // 128)

    def _step(self) -> None:
        if self.frozen or self.num_steps >= MOST_STEPS:
            return self._look()
        others = [event for event in self._events() if event != self._step]
        for left in reversed(range(self.source.choice((1, 1, 2, 3)))):
            self.script.append(learn(self._batch(), self._objective(), lonely=self.source.random() < 0.2))
            self.pending = True
            if self.source.random() < 0.3:
                # What drops the gradients may not be the last before a step: one without any is not compared.
                self.source.choice(others if left else self._reading())()
        self.num_steps += 1
        self.script.append(step)
        self.pending = False
        return None

    def _objective(self) -> Weighted | Reporting:
        if self.names == ("log_probs",) and not self.split and self.source.random() < 0.15:
            return Reporting()
        both = Capability.ENTROPY in self.lab.spec.capabilities and self.names == ("log_probs",)
        return Weighted(("log_probs", "entropy") if both and self.source.random() < 0.4 else tuple(self.names))

    def _skip(self) -> None:
        batch = self._batch()
        # A row of one token, or outside of the mask, has no gradient.
        while int(batch.lengths[0]) == 1 or "response_mask" in batch.tokens:
            batch = self._batch()
        value = self.source.choice((float("inf"), float("nan")))
        bad = Unfit(int(batch["row_id"][0]), value, tuple(self.names))
        acts = [learn(self._batch(), Weighted(tuple(self.names))), learn(batch, bad), skip]
        self.script += [aside(*acts)] if self.quiet else acts
        self.pending = False

    def _raise(self) -> None:
        batch = self._batch()
        acts = [learn(self._batch(), Weighted(tuple(self.names)))] if self.source.random() < 0.5 else []
        raising = learn(batch, Raising(batch["row_id"].tolist(), tuple(self.names)))
        acts.append(refused("an objective that raises", raising, Exception))
        self.script += [aside(*acts)] if self.quiet else acts
        self.pending = False

    def _load_nothing(self) -> None:
        if not self.pending:  # whether a refused checkpoint drops gradients is not promised
            empty = load(self.lab.new_folder("random-calls-empty"))
            self.script.append(refused("a checkpoint without any file", empty, CheckpointError))

    def _look(self) -> None:
        names = list(self.names)
        if Capability.ENTROPY in self.lab.spec.capabilities and self.names == ("log_probs",):
            names = self.source.choice((["log_probs"], ["entropy"], ["entropy", "log_probs"]))
        self.script.append(look(self._batch(), *names))

    def _look_again(self) -> None:
        """The same batch twice, and with other tokens in the same memory."""
        self.script.append(look_twice(self._batch(), *self.names))

    def _nothing(self) -> None:
        self.script.append(learn_nothing(self._batch(), Weighted(tuple(self.names))))

    def _read(self) -> None:
        self.script.append(read)

    def _save(self) -> None:
        folder = str(self.lab.new_folder("random-calls"))
        self.writing.add(len(self.script))
        self.script.append(self.source.choice((save, save_in_a_sync))(folder))
        instead = [learn(self._batch(), Weighted(tuple(self.names)))] if self.pending else []
        self.saved.append((folder, len(self.script), instead))

    def _load(self) -> None:
        if self.saved:
            self.script.append(load(self.source.choice(self.saved)[0]))
            self.pending = False

    def _offload(self) -> None:
        """Parts leave together and come back one after the other, with calls in between that do not need them."""
        away = self.source.sample(TRAIN_PARTS, self.source.randrange(1, 4))
        self.script.append(offload(*away))
        back = self.source.sample(away, len(away))
        while back:
            if self.source.random() < 0.6:
                self.source.choice(self._half_awake(back))()
            together = self.source.randrange(1, len(back) + 1)
            self.script.append(onload(*back[:together]))
            del back[:together]

    def _half_awake(self, away: Sequence[str]) -> list[Callable[[], None]]:
        """Events that need none of these parts."""
        found: list[Callable[[], None]] = [self._see_layout]
        if "weights" in away:
            return found
        found += [self._look, self._look_again, self._read]
        if Capability.EXPORT in self.lab.spec.capabilities:
            found.append(self._export)
        if not self.frozen and "optimizer" not in away:
            found.append(self._save)
        if not self.frozen and "gradients" not in away and not self.quiet:
            found.append(self._learn)
        return found

    def _see_layout(self) -> None:
        self.script.append(see_layout)

    def _learn(self) -> None:
        """A call that belongs to the next step."""
        self.script.append(learn(self._batch(), self._objective()))
        self.pending = True

    def _export(self) -> None:
        self.writing.add(len(self.script))
        self.script.append(export(self.lab.new_folder("random-calls-export")))

    def _reset(self) -> None:
        if not self.pending:  # whether a reset drops gradients is not promised
            self.script.append(reset(self.source.choice(OPTIMS)))


def _is_unchanged(measured: Measured, runs: Sequence[Driven], name: str) -> None:
    """Checks that two runs are equal."""
    alone, disturbed = runs
    measured.none(f"faults, {name}", [fault for run in runs for fault in run.faults])
    measured.equal(f"norms that differ, {name}", sum(a != b for a, b in zip(*(r.norms for r in runs), strict=True)), 0)
    losses = ([result.loss for result in run.results] for run in runs)
    measured.equal(f"losses that differ, {name}", sum(a != b for a, b in zip(*losses, strict=True)), 0)
    held = zip(alone.shards, disturbed.shards, strict=True)
    measured.none(f"weights that differ, {name}", [a[0] for a, b in held if not torch.equal(a[2], b[2])])


def plainly(case: Case, script: Sequence[Act]) -> Driven:
    """Runs a script in plain torch."""
    engine, found = PlainTrainEngine(case), Driven()
    for act in script:
        act(engine, found)
    record_final_state(engine, replace(case, export=None), found)
    return found
