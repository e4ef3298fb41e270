"""Requirements: the gradient is that of the sum of all losses, however rows are split, and steps follow the
settings."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from rlsdk.interfaces import Capability, Head
from rlsdk.testing.process.worlds import Seat
from rlsdk.testing.suites.requirements import Measured, requirement
from rlsdk.testing.train.case_runner import drive, driven, share
from rlsdk.testing.train.cases import OPTIM, Case, NotFinite, Weighted, train_batch
from rlsdk.testing.train.lab import TrainLab
from rlsdk.testing.train.plain_steps import drive_plain


def three_steps(masked: bool = False) -> list[list[Any]]:
    return [[train_batch(seed=10 + step, masked=masked)] for step in range(3)]


class GradientRequirements:
    """Mixed into `TrainConformance`."""

    @requirement("gradient", basic=True)
    def test_gradient(self, lab: TrainLab, measured: Measured) -> None:
        """Loss, metrics, gradient norm and weights over three steps equal those of plain autograd and AdamW."""
        case = lab.case(steps=three_steps())
        lab.holds_to_plain(measured, [lab.drive(steps=case.steps)], case)

    @requirement("gradient.mask", basic=True)
    def test_gradient_mask(self, lab: TrainLab, measured: Measured) -> None:
        """Tokens outside the `response_mask` have no gradient, whatever weight an objective gives them."""
        case = lab.case(steps=three_steps(masked=True))
        lab.holds_to_plain(measured, [lab.drive(steps=case.steps)], case)

    @requirement("gradient.entropy", needs=Capability.ENTROPY, basic=True)
    def test_gradient_entropy(self, lab: TrainLab, measured: Measured) -> None:
        """An objective may request the entropy, with its gradient, together with log-probs."""
        objective = Weighted(("log_probs", "entropy"))
        case = lab.case(steps=three_steps(), objective=objective)
        lab.holds_to_plain(measured, [lab.drive(steps=case.steps, objective=objective)], case)

    @requirement("gradient.values", needs=Capability.VALUE_HEAD, basic=True)
    def test_gradient_values(self, lab: TrainLab, measured: Measured) -> None:
        """A value model learns from an objective on `values`: head and body."""
        case = lab.case(steps=three_steps(), head=Head.VALUE, objective=Weighted(("values",)))
        lab.holds_to_plain(measured, [lab.run(drive, case)], case)

    @requirement("gradient.scores", needs=Capability.SCORE_HEAD)
    def test_gradient_scores(self, lab: TrainLab, measured: Measured) -> None:
        """A score model learns from an objective on `scores`: head and body."""
        case = lab.case(steps=three_steps(), head=Head.SCORE, objective=Weighted(("scores",)))
        lab.holds_to_plain(measured, [lab.run(drive, case)], case)

    @requirement("gradient.micro_batches", basic=True)
    def test_gradient_micro_batches(self, lab: TrainLab, measured: Measured) -> None:
        """Loss, metrics, gradient and weights are the same for every size of micro-batch: they are summed, not
        averaged."""
        steps = three_steps()
        whole = lab.drive(steps=steps)
        for name, limit in (("1 row", {"rows": 1}), ("2 rows", {"rows": 2}), ("30 tokens", {"tokens": 30})):
            cut = lab.drive(steps=steps, **limit)
            measured.at_least(f"passes of {name}", min(r.num_micro_batches for r in cut.results), 2)
            lab.holds(measured, [cut], whole, name)

    @requirement("gradient.padding")
    def test_gradient_padding(self, lab: TrainLab, measured: Measured) -> None:
        """With rows of very unequal length in one pass, padding does not contribute to loss or gradient."""
        steps = [[train_batch(7, seed=20 + at, longest=100)] for at in range(2)]
        case = lab.case(steps=steps)
        lab.holds_to_plain(measured, [lab.drive(steps=steps)], case)

    @requirement("gradient.row_order")
    def test_gradient_row_order(self, lab: TrainLab, measured: Measured) -> None:
        """The order of rows does not affect loss, gradient or weights."""
        steps = three_steps()
        order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
        mixed = [[batch.select(order) for batch in batches] for batches in steps]
        lab.holds(measured, [lab.drive(steps=mixed, rows=2)], lab.drive(steps=steps, rows=2))

    @requirement("gradient.calls", basic=True)
    def test_gradient_calls(self, lab: TrainLab, measured: Measured) -> None:
        """Gradients of several `forward_backward` calls before a step are summed; `forward` between them changes
        nothing."""
        steps = [[train_batch(6, seed=30), train_batch(5, seed=31)], [train_batch(4, seed=32), train_batch(7, seed=33)]]
        case = lab.case(steps=steps, rows=3)
        lab.holds_to_plain(measured, [lab.run(with_forward, case)], case)

    @requirement("step.clipping", basic=True)
    def test_clipping(self, lab: TrainLab, measured: Measured) -> None:
        """The gradient's 2-norm is clipped to `max_grad_norm`; the reported norm is that before clipping."""
        steps = three_steps()
        plain = drive_plain(lab.case(steps=steps[:1]))
        for share_of_norm in (0.3, 10.0):
            limit = plain.norms[0] * share_of_norm
            case = lab.case(steps=steps, optim=replace(OPTIM, max_grad_norm=limit))
            found = lab.drive(steps=steps, optim=case.optim)
            lab.holds_to_plain(measured, [found], case, f"limit {share_of_norm} of the norm")

    @requirement("step.schedule", basic=True)
    def test_schedule(self, lab: TrainLab, measured: Measured) -> None:
        """Every step uses and reports the learning rate of its schedule: warm-up, then constant, linear or cosine."""
        batch = [train_batch(2, seed=40, longest=5)]
        for schedule in ("constant", "linear", "cosine"):
            optim = replace(OPTIM, schedule=schedule, warmup_steps=2, total_steps=6, min_lr_ratio=0.1)
            case = lab.case(steps=[batch] * 7, optim=optim)
            found, plain = lab.drive(steps=case.steps, optim=optim), drive_plain(case)
            worst = max(abs(mine - theirs) for mine, theirs in zip(found.lrs, plain.lrs, strict=True))
            measured.at_most(f"largest difference of the rate, {schedule}", worst, 1e-9)
            lab.holds(measured, [found], plain, schedule)

    @requirement("step.skipped", basic=True)
    def test_skipped(self, lab: TrainLab, measured: Measured) -> None:
        """A step with a gradient that is not finite is skipped: weights, moments and schedule do not change, and the
        next step is as if it had not happened."""
        steps = three_steps()
        case = lab.case(steps=steps, optim=replace(OPTIM, warmup_steps=4))
        bad, found = lab.run(with_bad_step, case)
        measured.equal("skipped", bad.skipped, True)
        measured.equal("finite norm reported", math.isfinite(bad.grad_norm), False)
        lab.holds(measured, [found], lab.drive(steps=steps, optim=case.optim))
        measured.equal("rate of the next step", found.lrs[0], drive_plain(replace(case, steps=steps[:1])).lrs[0])


def with_forward(seat: Seat, case: Case) -> Any:
    """Runs a case with passes without gradient between its calls."""
    engine = seat.start(case.spec)
    original = engine.forward_backward
    other = train_batch(3, seed=99)

    def looked(batch: Any, objective: Any) -> Any:
        engine.forward(other, ("log_probs",))
        result = original(batch, objective)
        engine.forward(other, ("log_probs",))
        return result

    engine.forward_backward = looked  # type: ignore[method-assign]
    try:
        return driven(engine, case)
    finally:
        engine.close()


def with_bad_step(seat: Seat, case: Case) -> Any:
    """One step whose gradient is not finite, then the case."""
    engine = seat.start(case.spec)
    try:
        engine.forward_backward(share(engine, train_batch(seed=50)), NotFinite())
        return engine.optim_step(), driven(engine, case)
    finally:
        engine.close()
