"""Requirements: with training in bfloat16, each step is that of float32 except for rounding, whatever the settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rlsdk.interfaces import Batch, Capability, Head, OptimSpec
from rlsdk.testing.suites.requirements import Measured, requirement
from rlsdk.testing.train.call_sequences import Act, learn, look, skip, step
from rlsdk.testing.train.case_runner import by_row, whole
from rlsdk.testing.train.cases import EVERYTHING, OPTIM, SETTINGS, Driven, Weighted, rows_of
from rlsdk.testing.train.lab import TrainLab, claimed_heads, largest, seen_at, whole_of
from rlsdk.testing.train.objectives import Unfit
from rlsdk.testing.train.random_life import plainly
from rlsdk.testing.train.requirements.ranks import data_case

LENGTHS = (8, 3, 13, 5, 1, 9, 21, 2)
NUM_STEPS = 3
LOSS_SHARE, NORM_SHARE, MOVE_SHARE, OUTPUT_SHARE = 0.05, 0.05, 0.1, 0.05
"""Largest relative differences from float32 of losses, of gradient norms, of the change of all weights, and of outputs
(as a share of their spread). Rounding makes a fraction of each; what these are to find makes several times as much."""


@dataclass(frozen=True, kw_only=True)
class Course:
    """Steps in bfloat16 that are compared with float32."""

    optim: OptimSpec
    names: Sequence[str] = ("log_probs",)
    head: Head = Head.LM
    masked: bool = False
    temperature: float = 1.0
    limit: dict[str, Any] = field(default_factory=lambda: {"rows": 2})

    def script(self) -> list[Act]:
        """Steps of two calls, one of them after a step that was skipped, and outputs before and behind all of them."""
        objective, looking = Weighted(tuple(self.names)), look(self._rows(LENGTHS, 139), *self.names)
        script = [looking]
        for at in range(NUM_STEPS):
            script += [learn(self._rows(LENGTHS[part::2], 130 + 2 * at + part), objective) for part in (0, 1)]
            script.append(step)
            if at == 0:
                bad = rows_of((5, 4), seed=138)
                script += [learn(bad, Unfit(int(bad["row_id"][0]), outputs=tuple(self.names)[:1])), skip]
        return [*script, looking]

    def _rows(self, lengths: Sequence[int], seed: int) -> Batch:
        return rows_of(lengths, seed=seed, masked=self.masked, temperature=self.temperature)


class HalfPrecisionRequirements:
    """Mixed into `TrainConformance`."""

    @requirement("model.bfloat16_steps", since=(2, 0))
    def test_bfloat16_steps(self, lab: TrainLab, measured: Measured) -> None:
        """In bfloat16, losses, norms, rates, outputs and weights of steps are those of float32 except for rounding:
        with every setting of the optimizer, masks, temperatures, entropy, heads, several calls and micro-batches, and
        also after a skipped step."""
        if "bfloat16" not in lab.spec.dtypes:
            return measured.record("dtypes tried", 0)
        for name, course in courses_of(lab).items():
            case = lab.case(optim=course.optim, head=course.head, **course.limit)
            script = course.script()
            found = lab.play(script, optim=course.optim, head=course.head, dtype="bfloat16", **course.limit)
            _is_like(measured, [found], whole_of(plainly(case, [])), plainly(case, script), name)
        return None

    @requirement("ranks.bfloat16_steps", needs=Capability.DATA_PARALLEL, since=(2, 0))
    def test_ranks_bfloat16_steps(self, lab: TrainLab, measured: Measured) -> None:
        """As on one rank, steps in bfloat16 on several ranks are those of float32 except for rounding."""
        if "bfloat16" not in lab.spec.dtypes:
            return measured.record("dtypes tried", 0)
        for name, course in courses_of(lab).items():
            if name not in ("all settings", "strong decay", "values"):
                continue
            case = replace(data_case(lab, head=course.head, optim=course.optim, **course.limit), steps=())
            script = course.script()
            ranks = lab.play_split(replace(case, dtype="bfloat16"), script)
            _is_like(measured, ranks, whole_of(plainly(case, [])), plainly(case, script), name)
        return None


def courses_of(lab: TrainLab) -> dict[str, Course]:
    """Courses by a description for reports."""
    both = ("log_probs", "entropy") if Capability.ENTROPY in lab.spec.capabilities else ("log_probs",)
    found = {
        "all settings": Course(optim=EVERYTHING, names=both, masked=True, temperature=0.6),
        "temperature": Course(optim=OPTIM, names=both, temperature=1.6, limit={"tokens": 30, "checkpointing": True}),
        "short memory": Course(optim=SETTINGS["short memory"]),
        "large eps": Course(optim=SETTINGS["large eps"]),
        "strong decay": Course(optim=SETTINGS["strong decay"], limit={"tokens": 300}),
    }
    return found | {name: Course(optim=EVERYTHING, names=(name,), head=head) for head, name in claimed_heads(lab)}


def _is_like(
    measured: Measured, ranks: Sequence[Driven], start: Mapping[str, Tensor], expected: Driven, name: str
) -> None:
    """Checks that a run in bfloat16 is like one in float32 that began with the weights `start`."""
    measured.none(f"faults, {name}", [fault for rank in ranks for fault in rank.faults])
    losses, norms, rates = [0.0], [0.0], [0.0]
    scale = max(abs(result.loss) for result in expected.results)
    for rank in ranks:
        losses += [abs(a.loss - b.loss) / scale for a, b in zip(rank.results, expected.results, strict=True)]
        norms += [abs(a / b - 1) for a, b in zip(rank.norms, expected.norms, strict=True)]
        rates += [abs(a / b - 1) for a, b in zip(rank.lrs, expected.lrs, strict=True)]
    measured.at_most(f"difference of a rate, relative, {name}", largest(rates), 1e-6)
    measured.at_most(f"difference of a loss, as a share of the largest, {name}", largest(losses), LOSS_SHARE)
    measured.at_most(f"difference of a norm, relative, {name}", largest(norms), NORM_SHARE)
    right, mine = whole_of(expected), whole(ranks)
    change = torch.cat([(right[n] - start[n]).flatten() for n in sorted(right)])
    off = torch.cat([(mine[n] - right[n]).flatten() for n in sorted(right)])
    measured.at_most(
        f"difference of the change of weights, relative, {name}", float(off.norm() / change.norm()), MOVE_SHARE
    )
    for at, seen in enumerate(expected.seen):
        for output in seen:
            there = by_row([seen_at(expected, at)], output)
            here = by_row([seen_at(rank, at) for rank in ranks], output)
            wanted, got = (torch.cat([rows[row] for row in sorted(there)]) for rows in (there, here))
            share = float((got - wanted).abs().mean() / wanted.std())
            measured.at_most(f"difference of {output}, as a share of its spread, {name}", share, OUTPUT_SHARE)
