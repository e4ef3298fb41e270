"""Requirements: inputs, requested outputs, reported metrics and errors of objectives."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from json import JSONDecodeError
from typing import Any

import torch

from rlsdk.interfaces import Batch, Capability, ConfigError, Head
from rlsdk.testing.process.worlds import Seat
from rlsdk.testing.suites.requirements import Measured, requirement
from rlsdk.testing.train.call_sequences import learn, look, refused, step
from rlsdk.testing.train.case_runner import drive, share
from rlsdk.testing.train.cases import Case, Driven, Weighted, rows_of
from rlsdk.testing.train.lab import TrainLab, furthest_weight, whole_of
from rlsdk.testing.train.objectives import (
    Comparing,
    Counting,
    FullError,
    FullOnce,
    Inspecting,
    InspectingApart,
    RaisedHereError,
    Raising,
    Reporting,
    with_own_fields,
)
from rlsdk.testing.train.plain_steps import drive_plain

LENGTHS = (9, 3, 14, 6, 2, 11, 1, 8)
BOTH = ("log_probs", "entropy")


class ObjectiveRequirements:
    """Mixed into `TrainConformance`."""

    @requirement("objective.temperature", since=(2, 0))
    def test_objective_temperature(self, lab: TrainLab, measured: Measured) -> None:
        """The gradient is that of log-probs at the batch's temperature, which may differ between calls."""
        calls = [rows_of(LENGTHS, seed=at, temperature=t, masked=at == 1) for at, t in enumerate((0.5, 1.0, 1.6))]
        for rows in (None, 3):
            case = lab.case(steps=[calls[:2], calls[2:]], rows=rows, probe=(calls[0], ("log_probs",)))
            lab.holds_to_plain(measured, [lab.run(drive, case)], case, f"{rows or 'all'} rows a pass")

    @requirement("objective.both", needs=Capability.ENTROPY, since=(2, 0))
    def test_objective_both(self, lab: TrainLab, measured: Measured) -> None:
        """An objective may use log-probs and entropy together, or entropy alone, with a mask and a temperature."""
        for names in (BOTH, ("entropy",), tuple(reversed(BOTH))):
            batch = rows_of(LENGTHS, seed=2, masked=True, temperature=1.3)
            case = lab.case(steps=[[batch], [batch]], objective=Weighted(names), rows=3, probe=(batch, names))
            lab.holds_to_plain(measured, [lab.run(drive, case)], case, " and ".join(names))

    @requirement("objective.inputs", since=(2, 0))
    def test_objective_inputs(self, lab: TrainLab, measured: Measured) -> None:
        """An objective gets whole rows, each once, with every field and number of the batch, including the user's own,
        and exactly the outputs that it requested, in float32 whatever dtype the model computes in, and outside of its
        autocast. The batch does not change."""
        batch = with_own_fields(rows_of(LENGTHS, seed=3))
        limits: list[dict[str, Any]] = [{"rows": 3}, {"tokens": 16}, {}]
        limits += [{"rows": 3, "dtype": "bfloat16"}] if "bfloat16" in lab.spec.dtypes else []
        for limit in limits:
            result, changed = lab.run(inspected, lab.case(**limit), batch, Inspecting())
            sums = dict(result.sums)
            measured.equal(f"passes reported, {limit}", result.num_micro_batches, sums.pop("passes"))
            measured.equal(f"rows, {limit}", sums.pop("rows"), batch.num_rows)
            measured.equal(f"sum of identities, {limit}", sums.pop("identities"), float(batch["row_id"].sum()))
            for name, value in sums.items():
                measured.equal(f"{name}, {limit}", value, 0.0)
            measured.none("fields that an engine changed", changed)
        # Counted for each call, even if a step has several.
        batches = [with_own_fields(rows_of(lengths, seed=3)) for lengths in (LENGTHS, (4, 2), LENGTHS)]
        calls = [learn(one, Inspecting()) for one in batches]
        results = lab.play([*calls[:2], step, calls[2], step], rows=3).results
        off = [f"{r.num_micro_batches}, {r.sums['passes']:g} were made" for r in results
               if r.num_micro_batches != r.sums["passes"]]  # fmt: skip
        measured.none("numbers of passes that are not their call's", off)
        case = lab.case(steps=[[batch]], objective=Inspecting(), rows=3)
        found = lab.run(drive, case)
        lab.holds(measured, [without_metrics(found)], without_metrics(drive_plain(case)))

    @requirement("objective.metrics", since=(2, 0))
    def test_objective_metrics(self, lab: TrainLab, measured: Measured) -> None:
        """Sums are added and maxima combined, even if all are negative or some micro-batches do not report them, as
        tensors or as numbers. Counts of tens of millions stay exact."""
        batch = rows_of(LENGTHS, seed=4)
        batch = batch.with_meta(reporting_row=float(batch["row_id"][5]))
        for rows in (None, 1, 3):
            found = lab.play([learn(batch, Reporting())], rows=rows).results[0]
            where = f", {rows or 'all'} rows a pass"
            case = lab.case(steps=[[batch]], objective=Reporting())
            expected = drive_plain(case).results[0]
            absent = (expected.sums.keys() - found.sums.keys()) | (expected.maxima.keys() - found.maxima.keys())
            measured.none("metrics that are not reported" + where, sorted(absent))
            measured.at_most("difference of the loss" + where, abs(found.loss - expected.loss), 1e-4)
            for name in ("rows", "debt", "of one row"):
                off = abs(found.sums[name] - expected.sums[name])
                measured.at_most(f"difference of the sum {name}" + where, off, 1e-4)
            for name in ("highest", "of one row"):
                off = abs(found.maxima[name] - expected.maxima[name])
                measured.at_most(f"difference of the maximum {name}" + where, off, 1e-4)
            # From the pass with the shortest row, whichever other rows are in it.
            measured.equal("maximum below zero" + where, found.maxima["lowest"], -float(batch.lengths.min()))

        counting = Counting(int(batch["row_id"][0]))
        counted, total = lab.play([learn(batch, counting)], rows=1).results[0], counting.LARGE + batch.num_rows - 1.0
        measured.equal("sum of a large count and ones", counted.sums["tokens"], total)
        measured.equal("loss of a large count and ones", counted.loss, total)
        measured.equal("maximum of large counts", counted.maxima["tokens"], counting.LARGE + 1.0)

        other = rows_of((3, 20, 5), seed=9).with_meta(reporting_row=-1.0)
        alone = lab.play([learn(other, Reporting())], rows=2).results[0]
        behind = lab.play([learn(batch, Reporting()), learn(other, Reporting())], rows=2).results[1]
        for name in ("loss", "sums", "maxima"):
            same = getattr(alone, name) == getattr(behind, name)
            measured.none(f"{name} of an earlier call", [] if same else [f"{getattr(behind, name)}"])

    @requirement("objective.whole_groups", since=(2, 0))
    def test_objective_whole_groups(self, lab: TrainLab, measured: Measured) -> None:
        """Rows of equal `uid` are in one pass if the objective requires whole groups: loss and weights do not depend on
        the size of passes. If it does not require them, passes respect their limit."""
        lengths = (5, 9, 3, 12, 7, 7, 2, 10, 4)
        batch = rows_of(lengths, seed=5).with_rows(uid=torch.tensor([3, 8, 3, 1, 8, 3, 1, 8, 40]))
        script = [learn(batch, Comparing()), step]
        whole = lab.play(script)
        for name, limit in (("2 rows", {"rows": 2}), ("20 tokens", {"tokens": 20})):
            cut = lab.play(script, **limit)
            measured.at_least(f"passes, {name}", cut.results[0].num_micro_batches, 2)
            lab.holds(measured, [cut], whole, name)
        apart = with_own_fields(rows_of(lengths, seed=5)).with_rows(uid=torch.zeros(len(lengths), dtype=torch.int64))
        found = lab.play([learn(apart, InspectingApart(rows=2))], rows=2).results[0]
        measured.equal("passes over their limit, groups not asked for", found.sums["passes over their limit"], 0.0)

    @requirement("objective.raises", since=(2, 0))
    def test_objective_raises(self, lab: TrainLab, measured: Measured) -> None:
        """An objective's exception is raised unchanged, from any micro-batch, even if a device is out of memory;
        gradients, including those of earlier calls, are then zero, and the next step is not affected."""
        batch, other = rows_of(LENGTHS, seed=6), rows_of(LENGTHS, seed=7)
        expected = lab.play([learn(batch), step, learn(other), step], rows=2)
        kinds: list[tuple[int, type[Exception], tuple[object, ...]]] = [
            (0, RaisedHereError, ()),
            (4, ZeroDivisionError, ()),
            (5, JSONDecodeError, ("{", 1)),  # cannot be made again from its message
            (6, StopIteration, ()),
        ]
        for at, error, arguments in kinds:
            bad = learn(other, Raising((int(other["row_id"][at]),), error=error, arguments=arguments))
            raised = refused(f"an objective that raises {error.__name__}", bad, error)
            script = [raised, learn(batch), step, learn(batch), raised, learn(other), step]
            found = lab.play(script, rows=2)
            measured.none("faults", found.faults)
            del found.results[1]
            lab.holds(measured, [found], expected, f"raised at row {at}")
        row = int(other["row_id"][5])
        full = [
            refused("an objective that is out of memory once", learn(other, FullOnce((row,))), FullError) for _ in "ab"
        ]
        found = lab.play([full[0], learn(batch), step, learn(batch), full[1], learn(other), step], rows=2)
        measured.none("faults, out of memory", found.faults)
        del found.results[1]
        lab.holds(measured, [found], expected, "out of memory")
        left = lab.run(threads_left, lab.case(), batch, Raising((int(batch["row_id"][4]),)))
        measured.at_most("threads that an objective which raises leaves behind", left, 0)
        if "bfloat16" in lab.spec.dtypes:
            found = lab.play(script, rows=2, dtype="bfloat16")
            expected = lab.play([learn(batch), step, learn(other), step], rows=2, dtype="bfloat16")
            measured.none("faults, bfloat16", found.faults)
            off = furthest_weight(whole_of(found), whole_of(expected))
            measured.equal("largest difference of weights, bfloat16", off, 0.0)

    @requirement("objective.unknown_output", since=(2, 0))
    def test_objective_unknown_output(self, lab: TrainLab, measured: Measured) -> None:
        """An unknown output, or one that the head does not give, is a ConfigError, and so is a temperature of log-probs
        that is not above 0; the engine continues."""
        batch = rows_of(LENGTHS, seed=8)
        for head, gives, not_given in heads_of(lab):
            names = [*not_given, "logprobs"]
            tried = [refused(f"forward of {name!r}", look(batch, name), ConfigError) for name in names]
            tried += [refused(f"training on {n!r}", learn(batch, Weighted((n,))), ConfigError) for n in names]
            values = (0.0, -1.0, math.nan) if head is Head.LM else ()
            cold = [batch.with_meta(temperature=value) for value in values]
            tried += [refused(f"temperature {b.temperature}", look(b, gives), ConfigError) for b in cold]
            objective = Weighted((gives,))
            found = lab.play([*tried, learn(batch, objective), step], head=head)
            measured.none(f"faults, head {head.value}", found.faults)
            lab.holds(measured, [found], lab.play([learn(batch, objective), step], head=head), head.value)


def threads_left(seat: Seat, case: Case, batch: Batch, raising: Raising) -> int:
    """Number of Python threads that remain after three calls whose objective raises."""
    engine = seat.start(case.spec)
    try:
        engine.forward_backward(share(engine, batch), Weighted())
        before = threading.active_count()
        for _ in range(3):
            with suppress(raising.error):
                engine.forward_backward(share(engine, batch), raising)
        return threading.active_count() - before
    finally:
        engine.close()


def heads_of(lab: TrainLab) -> list[tuple[Head, str, Sequence[str]]]:
    """Claimed heads, an output of each, and outputs that it does not give."""
    found: list[tuple[Head, str, Sequence[str]]] = [(Head.LM, "log_probs", ("values", "scores"))]
    if Capability.VALUE_HEAD in lab.spec.capabilities:
        found.append((Head.VALUE, "values", ("log_probs", "entropy", "scores")))
    if Capability.SCORE_HEAD in lab.spec.capabilities:
        found.append((Head.SCORE, "scores", ("log_probs", "entropy", "values")))
    return found


def without_metrics(found: Driven) -> Driven:
    """Losses, norms and weights only: the metrics of `Inspecting` depend on the split into micro-batches."""
    found.results = [replace(result, sums={}, maxima={}) for result in found.results]
    return found


def inspected(seat: Seat, case: Case, batch: Batch, objective: Any) -> tuple[Any, list[str]]:
    """The result of one call, and the fields of the batch that changed."""
    engine = seat.start(case.spec)
    before = copy.deepcopy({**batch.tokens, **batch.rows, "lengths": batch.lengths})
    try:
        engine.forward(batch, ("log_probs",))
        result = engine.forward_backward(batch, objective)
        engine.optim_step()
        after = {**batch.tokens, **batch.rows, "lengths": batch.lengths}
        return result, [name for name, values in before.items() if not torch.equal(values, after[name])]
    finally:
        engine.close()
