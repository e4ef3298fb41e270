"""Requirements: random sequences of calls over the lifetime of an engine, compared with plain torch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlsdk.interfaces import Batch, Capability, Head
from rlsdk.kit.memory_parts import TRAIN_PARTS
from rlsdk.testing.call_sequences import (
    Act,
    export,
    learn,
    learn_nothing,
    load,
    look,
    offload,
    onload,
    play,
    read,
    refused,
    reset,
    save,
    skip,
    step,
)
from rlsdk.testing.case_runner import record_final_state
from rlsdk.testing.cases import OPTIM, Case, Driven, Weighted, rows_of
from rlsdk.testing.objectives import Raising, Unfit
from rlsdk.testing.requirements import Measured, requirement
from rlsdk.testing.train_lab import TrainLab
from rlsdk.testing.train_plain import PlainTrainEngine
from rlsdk.testing.train_ranks import data_case
from rlsdk.testing.train_settings import EVERYTHING, SETTINGS

EVENTS = 20
"""Number of events in one life; each is one call or a few."""
FEW_EVENTS = 11
"""Number of events if several processes take part."""
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

    @requirement("life", since=(2, 0))
    def test_life(self, lab: TrainLab, measured: Measured) -> None:
        """For steps of several calls, skipped steps, objectives that raise, outputs, checkpoints, exports, offloading
        and optimizer resets in random order, all results are plain torch's; also after a checkpoint in another
        engine."""
        for seed in range(3):
            life = Life.of(lab, seed)
            case = lab.case(optim=OPTIMS[seed % len(OPTIMS)], probe=life.probe(), **LIMITS[seed % len(LIMITS)])
            for name, script in life.scripts().items():
                found = lab.run(play, case, script)
                lab.holds(measured, [found], plainly(case, script), f"life {seed}, {name}")

    @requirement("life.heads", needs=Capability.VALUE_HEAD, since=(2, 0))
    def test_life_heads(self, lab: TrainLab, measured: Measured) -> None:
        """For random calls of a value model, all results are plain torch's."""
        for seed in (20, 21):
            life = Life.of(lab, seed, names=("values",))
            case = lab.case(head=Head.VALUE, probe=life.probe(), optim=OPTIMS[seed % 2], **LIMITS[1 + seed % 2])
            for name, script in life.scripts().items():
                found = lab.run(play, case, script)
                lab.holds(measured, [found], plainly(case, script), f"life {seed}, {name}")

    @requirement("life.ranks", needs=Capability.DATA_PARALLEL, since=(2, 0))
    def test_life_ranks(self, lab: TrainLab, measured: Measured) -> None:
        """For random calls of several ranks with different numbers of rows, or none, all results are plain torch's."""
        for seed in (40, 41):
            life = Life.of(lab, seed, num_events=FEW_EVENTS)
            optim, limit = OPTIMS[seed % len(OPTIMS)], LIMITS[seed % len(LIMITS)]
            case = replace(data_case(lab), optim=optim, steps=(), probe=life.probe(), **limit)
            for name, script in life.scripts().items():
                ranks = lab.play_split(case, script)
                lab.holds(measured, ranks, plainly(case, script), f"life {seed}, {name}")


@dataclass(eq=False)
class Life:
    """A random script. It is the same for all engines with the same claims."""

    lab: TrainLab
    source: random.Random
    names: Sequence[str] = ("log_probs",)
    script: list[Act] = field(default_factory=list)
    saved: list[tuple[str, int]] = field(default_factory=list)
    """Folders of checkpoints, and the length of the script at that time."""
    writing: set[int] = field(default_factory=set)
    """Acts that write into folders."""
    num_steps: int = 0
    num_batches: int = 0

    @classmethod
    def of(cls, lab: TrainLab, seed: int, names: Sequence[str] = ("log_probs",), num_events: int = EVENTS) -> Life:
        """A complete life."""
        life = cls(lab, random.Random(seed), names)
        events = list(life._events())
        life._step()
        order = [*life.source.sample(events, len(events)), *life.source.choices(events, k=num_events)]
        for event in order[:num_events]:
            event()
        life._step()
        return life

    def probe(self) -> tuple[Batch, tuple[str, ...]]:
        return rows_of((12, 1, 5, 3), seed=7), tuple(self.names)

    def scripts(self) -> dict[str, list[Act]]:
        """The life; and, for another engine, the part after its last checkpoint."""
        found = {"whole": self.script}
        if self.saved:
            folder, at = self.saved[-1]
            rest = [act for i, act in enumerate(self.script) if i >= at and i not in self.writing]
            found["behind a checkpoint"] = [load(folder), *rest]
        return found

    def _events(self) -> Iterator[Callable[[], None]]:
        claimed = self.lab.spec.capabilities
        yield from (self._step, self._step, self._save, self._load, self._look, self._nothing, self._read)
        if self.names == ("log_probs",):
            yield from (self._skip, self._raise)
        if Capability.OFFLOAD in claimed:
            yield self._offload
        if Capability.EXPORT in claimed:
            yield self._export
        if self.lab.can_reset:
            yield self._reset

    def _batch(self) -> Batch:
        self.num_batches += 1
        lengths = self.source.choices(LENGTHS, k=self.source.randrange(2, 9))
        warm = self.source.choice((1.0, 1.0, 0.7, 1.6))
        found = rows_of(lengths, seed=self.num_batches, masked=self.source.random() < 0.4, temperature=warm)
        return found if self.source.random() < 0.8 else found.select(range(1))

    def _step(self) -> None:
        if self.num_steps >= MOST_STEPS:
            return self._look()
        for _ in range(self.source.choice((1, 1, 2, 3))):
            self.script.append(learn(self._batch(), self._objective(), lonely=self.source.random() < 0.2))
            if self.source.random() < 0.2:
                self._look()
        self.num_steps += 1
        self.script.append(step)
        return None

    def _objective(self) -> Weighted:
        both = Capability.ENTROPY in self.lab.spec.capabilities and self.names == ("log_probs",)
        return Weighted(("log_probs", "entropy") if both and self.source.random() < 0.4 else tuple(self.names))

    def _skip(self) -> None:
        batch = self._batch()
        bad = Unfit(int(batch["row_id"][0]), self.source.choice((float("inf"), float("nan"))))
        # A row of one token has no gradient.
        if int(batch.lengths[0]) > 1 and "response_mask" not in batch.tokens:
            self.script += [learn(self._batch()), learn(batch, bad), skip]

    def _raise(self) -> None:
        batch = self._batch()
        self.script += [learn(self._batch())] if self.source.random() < 0.5 else []
        raising = learn(batch, Raising(batch["row_id"].tolist()))
        self.script.append(refused("an objective that raises", raising, Exception))

    def _look(self) -> None:
        self.script.append(look(self._batch(), *self.names))

    def _nothing(self) -> None:
        self.script.append(learn_nothing(self._batch(), Weighted(tuple(self.names))))

    def _read(self) -> None:
        self.script.append(read)

    def _save(self) -> None:
        folder = str(self.lab.new_folder("life"))
        self.writing.add(len(self.script))
        self.script.append(save(folder))
        self.saved.append((folder, len(self.script)))

    def _load(self) -> None:
        if self.saved:
            self.script.append(load(self.source.choice(self.saved)[0]))

    def _offload(self) -> None:
        parts = self.source.sample(TRAIN_PARTS, self.source.randrange(1, 4))
        self.script += [offload(*parts), onload(*self.source.sample(parts, len(parts)))]

    def _export(self) -> None:
        self.writing.add(len(self.script))
        self.script.append(export(self.lab.new_folder("life-export")))

    def _reset(self) -> None:
        self.script.append(reset(self.source.choice(OPTIMS)))


def plainly(case: Case, script: Sequence[Act]) -> Driven:
    """Runs a script in plain torch."""
    engine, found = PlainTrainEngine(case), Driven()
    for act in script:
        act(engine, found)
    record_final_state(engine, replace(case, export=None), found)
    return found
