"""A random script of calls over the lifetime of an engine, and the same in plain torch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rlsdk.interfaces import Batch, Capability, CheckpointError
from rlsdk.kit.memory.memory_parts import TRAIN_PARTS
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
    read,
    refused,
    reset,
    save,
    save_in_a_sync,
    see_layout,
    skip,
    step,
)
from rlsdk.testing.train.case_runner import record_final_state
from rlsdk.testing.train.cases import EVERYTHING, OPTIM, SETTINGS, Case, Driven, Weighted, rows_of
from rlsdk.testing.train.lab import TrainLab
from rlsdk.testing.train.objectives import Raising, Reporting, Unfit
from rlsdk.testing.train.plain_engine import PlainTrainEngine

EVENTS = 22
"""Number of events in one life; each is one call or a few."""
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


def plainly(case: Case, script: Sequence[Act]) -> Driven:
    """Runs a script in plain torch."""
    engine, found = PlainTrainEngine(case), Driven()
    for act in script:
        act(engine, found)
    record_final_state(engine, replace(case, export=None), found)
    return found
