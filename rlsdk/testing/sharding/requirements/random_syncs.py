"""Requirement: random sequences of syncs over the lifetime of a sharding manager."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from torch import Tensor

from rlsdk.interfaces import WeightSyncError
from rlsdk.testing.sharding.faulty_replicas import damages
from rlsdk.testing.sharding.lab import ShardingLab, Trial
from rlsdk.testing.sharding.layouts import Pair, copies, in_one_process, pairs
from rlsdk.testing.sharding.oracle import same_bits
from rlsdk.testing.sharding.requirements.faults import LARGE, PROOF_ERRORS, REFUSED, refused
from rlsdk.testing.suites.requirements import Measured, requirement

NUM_SYNCS = 16
"""Number of syncs in one life."""


class SyncLifeRequirements:
    """Mixed into `ShardingConformance`."""

    @requirement("sync.random_calls", since=(2, 0))
    def test_random_calls(self, lab: ShardingLab, measured: Measured) -> None:
        """For random syncs (of steps, single elements, nothing, or weights of long ago; under any version and
        `expect_change`; of restarted replicas; with ranks that fail and replicas that serve something else), each is
        refused exactly if it must be, and replicas serve the weights of those that are accepted."""
        for seed, (name, pair) in enumerate(_pairs().items()):
            life = _Life(lab.trial(pair, **LARGE), random.Random(seed))
            for at in range(NUM_SYNCS):
                fault = life.sync()
                measured.none(f"wrong, {name}, sync {at}", [fault] if fault else [])


def _pairs() -> dict[str, Pair]:
    named = pairs()
    return {
        "two replicas": in_one_process(replicas=2),
        "copies": copies(2, 2),
        **{name: named[name] for name in ("tensor parallel to another", "float32 to bfloat16 and float32")},
    }


@dataclass(eq=False)
class _Life:
    """One manager; it knows what each sync must do."""

    trial: Trial
    source: random.Random
    version: int | None = None
    """Of the last sync that was accepted."""
    seen: list[dict[str, Tensor]] = field(default_factory=list)
    """Weights of those syncs."""

    def sync(self) -> str | None:
        """A random sync; its fault, if there is one."""
        how = self._change()
        last = self.version or 0
        version = self.source.choice((last + 1, last + 1, last + 3, last, max(last - 1, 0)))
        expect_change = self.source.choice((None, None, True, False))
        if self.source.random() < 0.2:
            self.trial.forget(self.source.randrange(len(self.trial.replicas)))
            how += ", a replica started anew"
        how += f", version {version} after {self.version}, expect_change {expect_change}"
        if self.source.random() < 0.3:
            return self._fails(how, version, expect_change)
        expected = expect_change if expect_change is not None else self.version is not None and version > self.version
        refuses = bool(expected and self.seen and not self._has_changed())
        try:
            self.trial.sync(version, expect_change=expect_change)
        except WeightSyncError as error:
            return None if refuses else f"{how}: {error}"
        if refuses:
            return f"{how}: was accepted"
        self.version = version
        self.seen.append(self.trial.snapshot())
        differing = self.trial.differing()
        return f"{how}: {differing[0]} differs" if differing else None

    def _change(self) -> str:
        kind = self.source.choice(("a step", "an element", "nothing", "weights of before"))
        if kind == "a step":
            self.trial.step()
        elif kind == "an element":
            name = self.source.choice([n for n, t in self.trial.truth.items() if t.is_floating_point() and t.numel()])
            values = self.trial.truth[name].view(-1)
            at = self.source.randrange(len(values))
            values[at] = 3.0 if abs(float(values[at]) - 3.0) > 1.0 else 5.0
        elif kind == "weights of before" and self.seen:
            for name, values in self.source.choice(self.seen).items():
                self.trial.truth[name].copy_(values)
        self.trial.load()
        return kind

    def _fails(self, how: str, version: int, expect_change: bool | None) -> str | None:
        """A sync with a fault, which must be refused whatever has changed."""
        kind = self.source.choice(("a replica that serves something else", "no fingerprints", "a dead rank"))
        replica, rank = self.source.choice(self.trial.replicas), self.source.choice(self.trial.sources)
        if kind == "no fingerprints":
            rank = self.trial.sources[0]  # others may not be asked
            rank.proof_error = self.source.choice(PROOF_ERRORS)
        elif kind == "a dead rank":
            for each in self.trial.sources:
                each.left = 0
        else:
            replica.lie = damages(self.source.choice(sorted({name for name, _, _ in replica.serving.served})))
        errors = (WeightSyncError,) if replica.lie is not None else REFUSED
        was_refused = refused(self.trial, version, *errors, expect_change=expect_change)
        replica.lie, rank.proof_error = None, None
        for each in self.trial.sources:
            each.left = 10**9
        return None if was_refused else f"{how}: {kind} was accepted"

    def _has_changed(self) -> bool:
        return any(not same_bits(values, self.trial.truth[name]) for name, values in self.seen[-1].items())
