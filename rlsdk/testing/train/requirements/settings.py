"""Requirements: optimizer settings of every kind, skipped steps, zero gradients, and `reset_optimizer`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from rlsdk.testing.suites.requirements import Measured, requirement
from rlsdk.testing.train.call_sequences import learn, reset, skip, step
from rlsdk.testing.train.case_runner import drive
from rlsdk.testing.train.cases import EVERYTHING, OPTIM, SETTINGS, rows_of
from rlsdk.testing.train.lab import TrainLab, furthest_weight, whole_of
from rlsdk.testing.train.objectives import LossAlone, Unfit
from rlsdk.testing.train.plain_steps import drive_plain, plain_model_of, plain_numbers, scheduled

LENGTHS = (8, 3, 13, 5, 1, 9)


def three_batches(seed: int = 90) -> list[Any]:
    return [rows_of(LENGTHS, seed=seed + at) for at in range(3)]


def script_of(batches: list[Any]) -> list[Any]:
    """A script with one step per batch."""
    return [act for batch in batches for act in (learn(batch), step)]


class SettingRequirements:
    """Mixed into `TrainConformance`."""

    @requirement("step.settings", since=(2, 0))
    def test_step_settings(self, lab: TrainLab, measured: Measured) -> None:
        """betas, eps and weight decay are those of the specification: four steps equal those of torch's AdamW."""
        for name, optim in SETTINGS.items():
            steps = [[batch] for batch in [*three_batches(), rows_of(LENGTHS, seed=95)]]
            case = lab.case(steps=steps, optim=optim)
            found = lab.run(drive, case)
            expected = lab.holds_to_plain(measured, [found], case, name)
            rates = [abs(a - b) for a, b in zip(found.lrs, expected.lrs, strict=True)]
            measured.at_most(f"largest difference of the rate, {name}", max(rates), 1e-9)

    @requirement("step.clipping_calls", since=(2, 0))
    def test_clipping_calls(self, lab: TrainLab, measured: Measured) -> None:
        """The gradient of the whole step is clipped: of all calls, micro-batches and tensors together."""
        calls = [rows_of(LENGTHS, seed=96), rows_of((2, 1, 30), seed=97), rows_of((4,), seed=98)]
        whole = drive_plain(lab.case(steps=[calls])).norms[0]
        for share in (0.1, 0.99, 1.01):
            case = lab.case(steps=[calls, calls[1:]], rows=2, optim=replace(OPTIM, max_grad_norm=whole * share))
            lab.holds_to_plain(measured, [lab.run(drive, case)], case, f"limit {share} of the norm")

    @requirement("step.uneven_calls", since=(2, 0))
    def test_uneven_calls(self, lab: TrainLab, measured: Measured) -> None:
        """Calls and micro-batches with very different numbers of tokens are weighted only by their own weights."""
        calls = [rows_of((60, 1, 2), seed=99), rows_of((1,), seed=100), rows_of((3,) * 12, seed=101)]
        for limit in ({"tokens": 40}, {"rows": 1}):
            case = lab.case(steps=[calls, calls[::-1]], **limit)
            lab.holds_to_plain(measured, [lab.run(drive, case)], case, str(limit))

    @requirement("step.zero_gradient", since=(2, 0))
    def test_zero_gradient(self, lab: TrainLab, measured: Measured) -> None:
        """Rows without weight change nothing but the passes; a zero gradient is an ordinary step, clipped or not:
        moments and weights decay."""
        one, two, three = three_batches()
        weight = two["loss_weight"].clone()
        weight[: int(two.lengths[:4].sum())] = 0.0
        partly, nothing = two.with_tokens(loss_weight=weight), three.with_tokens(loss_weight=three["loss_weight"] * 0)
        for name, limit in (("not clipped", None), ("clipped", 0.05)):
            optim = replace(OPTIM, max_grad_norm=limit)
            case = lab.case(steps=[[one], [partly], [nothing], [two]], optim=optim, rows=2)
            found = lab.run(drive, case)
            measured.none(f"steps that were skipped, {name}", [at for at, s in enumerate(found.skipped) if s])
            measured.equal(f"norm of nothing, {name}", found.norms.pop(2), 0.0)
            expected = drive_plain(case)
            del expected.norms[2]
            lab.holds(measured, [found], expected, name)

    @requirement("step.skipped_later", since=(2, 0))
    def test_skipped_later(self, lab: TrainLab, measured: Measured) -> None:
        """A step whose gradient is infinite or NaN, because of one row of one call, is skipped at any point, and so are
        two consecutive ones: later steps equal, bit for bit, those without it."""
        batches, other = three_batches(), rows_of(LENGTHS, seed=97)
        expected = lab.play(script_of(batches), optim=EVERYTHING, rows=2)
        for at, value in ((0, math.inf), (1, math.nan), (2, 3e38), (3, -math.inf)):
            bad = [learn(other), learn(other, Unfit(int(other["row_id"][2]), value)), learn(other), skip]
            bad += [learn(other, Unfit(int(other["row_id"][1]), value)), skip] if at else []
            script = [*script_of(batches[:at]), *bad, *script_of(batches[at:])]
            found = lab.play(script, optim=EVERYTHING, rows=2)
            where = f"{value} before step {at}"
            measured.none(f"faults, {where}", found.faults)
            del found.results[at : len(found.results) - len(batches) + at]
            lab.holds(measured, [found], expected, where)
            rates = [abs(a - b) for a, b in zip(found.lrs, expected.lrs, strict=True)]
            measured.equal(f"largest difference of the rate, {where}", max(rates), 0.0)

    @requirement("step.schedule_end", since=(2, 0))
    def test_schedule_end(self, lab: TrainLab, measured: Measured) -> None:
        """A schedule stays at its final rate for all later steps; it starts correctly without warm-up, and with a
        warm-up over all steps but one."""
        batch, steps = rows_of((2, 1), seed=102), 12
        for schedule in ("constant", "linear", "cosine"):
            for warmup, total, least in ((0, 5, 0.0), (0, 4, 0.25), (3, 4, 0.1)):
                optim = replace(
                    OPTIM,
                    schedule=schedule,
                    warmup_steps=warmup,
                    total_steps=total,
                    min_lr_ratio=least,
                    weight_decay=0.0,
                )
                found = lab.play([act for _ in range(steps) for act in (learn(batch), step)], optim=optim)
                rates = [abs(rate - scheduled(at, optim)) for at, rate in enumerate(found.lrs)]
                where = f"{schedule}, {warmup} of {total} steps to warm up, to {least}"
                measured.at_most(f"largest difference of the rate, {where}", max(rates), 1e-9)

    @requirement("step.infinite", since=(2, 0))
    def test_infinite(self, lab: TrainLab, measured: Measured) -> None:
        """A gradient with infinite elements but no NaN is skipped, as any that is not finite."""
        batches, other = three_batches(), rows_of(LENGTHS, seed=97)
        row = int(other["row_id"][2])
        slope = infinite_slope(lab, other, row)
        measured.record("slope of its row", slope)
        if slope:
            bad = [learn(other, Unfit(row, slope)), skip]
            script = [*script_of(batches[:1]), *bad, *script_of(batches[1:])]
            found, expected = lab.play(script, optim=EVERYTHING), lab.play(script_of(batches), optim=EVERYTHING)
            del found.results[1]
            lab.holds(measured, [found], expected)

    @requirement("step.infinite_loss", since=(2, 0))
    def test_infinite_loss(self, lab: TrainLab, measured: Measured) -> None:
        """If the loss is not finite but its gradient is, the step is an ordinary one: only the gradient matters."""
        batches = three_batches()
        expected = lab.play(script_of(batches), optim=EVERYTHING)
        for value in (math.nan, math.inf):
            script = [*script_of(batches[:1]), learn(batches[1], LossAlone(value)), step, *script_of(batches[2:])]
            found = lab.play(script, optim=EVERYTHING)
            measured.equal(f"steps that were skipped, a loss of {value}", sum(found.skipped), 0)
            measured.equal(f"finite number told for a loss of {value}", math.isfinite(found.results[1].loss), 0)
            off = furthest_weight(whole_of(found), whole_of(expected))
            measured.at_most(f"largest difference of weights, a loss of {value}", off, lab.suite.step_tolerance)

    @requirement("step.reset", since=(2, 0))
    def test_reset(self, lab: TrainLab, measured: Measured) -> None:
        """`reset_optimizer`, if an engine has it, starts again: no moments, no gradients, step 0 of the new schedule,
        and unchanged weights."""
        if not lab.can_reset:
            return measured.record("engines that can be reset", 0)
        batches = three_batches()
        found = lab.play([*script_of(batches), reset(EVERYTHING), *script_of(batches)])
        measured.equal(
            "rate of the first step", found.lrs[3], drive_plain(lab.case(steps=[[batches[0]]], optim=EVERYTHING)).lrs[0]
        )
        halfway = drive_plain_from(lab, batches)
        worst = max(abs(a / b - 1) for a, b in zip(found.norms[3:], halfway.norms, strict=True))
        measured.at_most("gradient norm, relative", worst, lab.suite.step_tolerance)
        lab.holds(measured, [after(found, 3)], halfway)
        for dtype in {"float32", "bfloat16"} & lab.spec.dtypes:
            before, behind = (lab.play([*script_of(batches), *more], dtype=dtype) for more in ([], [reset(EVERYTHING)]))
            off = furthest_weight(whole_of(before), whole_of(behind))
            measured.equal(f"difference of weights that a reset made, {dtype}", off, 0.0)


def infinite_slope(lab: TrainLab, batch: Any, row: int, model: str | None = None) -> float:
    """Approximately the smallest gradient of one row's log-probs at which some parameter gradient overflows to infinity
    and none to NaN. Only few elements overflow, so that some of several ranks have none. 0: there is no such value."""
    case = lab.case() if model is None else lab.case(model=model)
    plain = plain_model_of(case)

    def overflows(exponent: float) -> bool | None:
        """Whether a gradient overflows to infinity; None: to NaN."""
        plain.zero_grad()
        result = Unfit(row, 2.0**exponent)(plain_numbers(plain, case.head, batch), batch)
        result.loss.backward()  # type: ignore[no-untyped-call]
        gradients = torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None])
        return None if bool(gradients.isnan().any()) else bool(gradients.isinf().any())

    least = next((at for at in range(119 if model is None else 0, 128) if overflows(at) is not False), None)
    if least is None:
        return 0.0
    low, high = least - 1.0, float(least)
    for _ in range(7):
        middle = (low + high) / 2
        low, high = (middle, high) if overflows(middle) is False else (low, middle)
    return 2.0**high if overflows(high) else 0.0


def after(found: Any, steps: int) -> Any:
    """The results without those of the first steps."""
    for name in ("results", "norms", "lrs", "skipped"):
        setattr(found, name, getattr(found, name)[steps:])
    return found


def drive_plain_from(lab: TrainLab, batches: list[Any]) -> Any:
    """Three steps in plain torch, then three more with a new optimizer of other settings."""
    first = drive_plain(lab.case(steps=[[batch] for batch in batches]))
    model = plain_model_of(lab.case())
    values = {name: tensor for name, _, tensor in first.shards}
    model.load_state_dict(values, strict=False)
    return drive_plain(lab.case(steps=[[batch] for batch in batches], optim=EVERYTHING), model=model)
