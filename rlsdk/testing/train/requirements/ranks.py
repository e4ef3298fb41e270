"""Requirements: several ranks, with different numbers of rows or none, give the results of one."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from rlsdk.interfaces import Capability, Head
from rlsdk.kit.memory.memory_parts import TRAIN_PARTS
from rlsdk.kit.model.hf import canonical_parameters
from rlsdk.testing.suites.requirements import Measured, requirement
from rlsdk.testing.train.call_sequences import Act, learn, load, look, offload, onload, read, refused, save, skip, step
from rlsdk.testing.train.case_runner import whole
from rlsdk.testing.train.cases import EVERYTHING, OPTIM, Case, Driven, Weighted, rows_of
from rlsdk.testing.train.lab import TrainLab, claimed_heads, furthest_weight, largest, whole_of
from rlsdk.testing.train.objectives import RaisedHereError, Raising, Reporting, Unfit
from rlsdk.testing.train.plain_steps import drive_plain, plain_model_of
from rlsdk.testing.train.requirements.exports import ill_fitting
from rlsdk.testing.train.requirements.models import LINEAR, TENSOR_TOLERANCE, worst_tensor
from rlsdk.testing.train.requirements.parallelism import split_case

UNLIKE = (260, 2, 3, 1, 140, 5, 4, 2, 9)
"""Lengths of rows: the first of two ranks has a hundred times as many tokens as the other."""
FEW = (6, 11, 3, 8, 1, 7)


class RankRequirements:
    """Mixed into `TrainConformance`."""

    @requirement("ranks.settings", needs=Capability.DATA_PARALLEL, since=(2, 0))
    def test_ranks_settings(self, lab: TrainLab, measured: Measured) -> None:
        """Clipping uses the norm of all ranks' gradient, which each rank reports; betas, decay and schedule work as on
        one rank, also with masks, temperature and recomputation."""
        case = data_case(lab)
        norm = drive_plain(replace(case, steps=case.steps[:1])).norms[0]
        changes: dict[str, dict[str, Any]] = {
            "clipped": {"optim": replace(OPTIM, max_grad_norm=0.3 * norm)},
            "not quite clipped": {"optim": replace(OPTIM, max_grad_norm=1.01 * norm)},
            "other settings": {"optim": EVERYTHING, "rows": 2, "checkpointing": True},
            "mask and temperature": {"steps": steps_of(FEW, masked=True, temperature=0.7), "tokens": 16},
        }
        for name, change in changes.items():
            found = replace(case, **change)
            ranks = lab.drive_split(found)
            expected = lab.holds_to_plain(measured, ranks, found, name)
            rates = [abs(a - b) for rank in ranks for a, b in zip(rank.lrs, expected.lrs, strict=True)]
            measured.at_most(f"largest difference of the rate, {name}", max(rates), 1e-9)
            measured.equal(f"norms of unlike ranks, {name}", len({tuple(rank.norms) for rank in ranks}) - 1, 0)

    @requirement("ranks.uneven_rows", needs=Capability.DATA_PARALLEL, since=(2, 0))
    def test_ranks_uneven_rows(self, lab: TrainLab, measured: Measured) -> None:
        """Ranks with different numbers of rows, tokens and passes, even a single row or none, give the results of one
        rank with all rows: nothing is averaged over ranks, rows or tokens."""
        cases: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
            "260 tokens beside 2": (UNLIKE, {"tokens": 100}),
            "one row": ((7,), {}),
            "no rows on the others, many passes": (FEW, {"lonely": True, "rows": 1}),
        }
        for name, (lengths, change) in cases.items():
            batch = rows_of(lengths, seed=41)
            case = replace(data_case(lab), steps=[[batch], [batch]], probe=(batch, ("log_probs",)), **change)
            lab.holds_to_plain(measured, lab.drive_split(case), case, name)

    @requirement("ranks.gradient", needs=Capability.DATA_PARALLEL, since=(2, 0), basic=True)
    def test_ranks_gradient(self, lab: TrainLab, measured: Measured) -> None:
        """Every tensor's gradient is that of one rank, relative to its own size: it is float32 even in communication
        between ranks."""
        case = data_case(lab, steps=[[rows_of(FEW, seed=42), rows_of((3, 40), seed=43)]], optim=LINEAR, rows=2)
        worst = worst_tensor(lab, case, lab.drive_split(case))
        measured.at_most("gradient of a tensor, relative", worst, TENSOR_TOLERANCE)

    @requirement("ranks.entropy", needs=Capability.DATA_PARALLEL, since=(2, 0))
    def test_ranks_entropy(self, lab: TrainLab, measured: Measured) -> None:
        """Log-probs and entropy together, with and without gradient, are right on several ranks."""
        if Capability.ENTROPY not in lab.spec.capabilities:
            return measured.record("outputs tried", 0)
        names = ("log_probs", "entropy")
        steps = steps_of(FEW, masked=True, temperature=1.4)
        case = replace(data_case(lab), steps=steps, objective=Weighted(names), probe=(steps[0][0], names), rows=2)
        lab.holds_to_plain(measured, lab.drive_split(case), case)

    @requirement("ranks.heads", needs=Capability.DATA_PARALLEL, since=(2, 0))
    def test_ranks_heads(self, lab: TrainLab, measured: Measured) -> None:
        """Value and score models learn on several ranks as on one, even if a rank has no rows."""
        for head, name in claimed_heads(lab):
            steps = steps_of(FEW, 1)
            case = replace(
                data_case(lab, head=head), steps=steps, objective=Weighted((name,)), probe=(steps[0][0], (name,))
            )
            for where, lonely in ((name, False), (f"{name}, no rows on the others", True)):
                found = replace(case, lonely=lonely)
                lab.holds_to_plain(measured, lab.drive_split(found), found, where)

    @requirement("ranks.metrics", needs=Capability.DATA_PARALLEL, since=(2, 0))
    def test_ranks_metrics(self, lab: TrainLab, measured: Measured) -> None:
        """Metrics cover the rows of all ranks and are equal on each, even if they are negative or only one rank, the
        first or a later one, reports them."""
        batch = rows_of(FEW, seed=44)
        case = replace(data_case(lab), objective=Reporting(), probe=None)
        for at, lonely, rows in ((0, False, 2), (1, False, 2), (1, True, 2), (1, False, None)):
            marked = batch.with_meta(reporting_row=float(batch["row_id"][at]))
            expected = drive_plain(replace(case, steps=[[marked]])).results[0]
            for rank in lab.drive_split(replace(case, steps=[[marked]], rows=rows, lonely=lonely)):
                mine = rank.results[0]
                absent = (expected.sums.keys() - mine.sums.keys()) | (expected.maxima.keys() - mine.maxima.keys())
                measured.none("metrics that are not reported", sorted(absent))
                off = [abs(mine.sums[name] - value) for name, value in expected.sums.items()]
                off += [abs(mine.maxima[name] - value) for name, value in expected.maxima.items()]
                measured.at_most("largest difference of a metric", largest(off), 1e-4)

    @requirement("ranks.initial", needs=Capability.DATA_PARALLEL, since=(2, 0))
    def test_ranks_initial(self, lab: TrainLab, measured: Measured) -> None:
        """Engines on several ranks start from the same weights as one rank: read or random, including a new head."""
        fields: dict[str, dict[str, Any]] = {"read": {}, "random": {"random": True}}
        if Capability.VALUE_HEAD in lab.spec.capabilities:
            fields["a new head"] = {"head": Head.VALUE, "model": lab.model}
        for name, given in fields.items():
            case = replace(data_case(lab), steps=[], probe=None, **given)
            ranks, one = lab.drive_split(case), lab.play([], **given)
            measured.equal(
                f"largest difference from one rank, {name}", furthest_weight(whole(ranks), whole_of(one)), 0.0
            )
            measured.equal(f"largest difference of copies, {name}", furthest_copy(ranks), 0.0)

    @requirement("ranks.layout", needs=Capability.DATA_PARALLEL, since=(2, 0), basic=True)
    def test_ranks_layout(self, lab: TrainLab, measured: Measured) -> None:
        """Each rank's layout has its rank and does not change; all boxes together cover every element; copies on
        several ranks are equal after steps."""
        case = data_case(lab)
        script = [act for batches in case.steps for act in (read, learn(batches[0]), step, read)]
        ranks = lab.play_split(case, script)
        measured.none("faults", [fault for rank in ranks for fault in rank.faults])
        numbered = [rank.layout.rank for rank in ranks if rank.layout is not None]
        measured.equal("ranks with the number of another", numbered != list(range(len(ranks))), 0)
        values = whole(ranks)
        expected = {n: tuple(p.shape) for n, p in canonical_parameters(plain_model_of(case))[0].items()}
        strange = sorted(
            n
            for n in expected.keys() | values.keys()
            if expected.get(n) != (tuple(values[n].shape) if n in values else None)
        )
        measured.none("tensors of another name or shape", strange)
        measured.none("tensors that no rank holds whole", [n for n, t in values.items() if not t.isfinite().all()])
        measured.equal("largest difference of copies", furthest_copy(ranks), 0.0)

    @requirement("ranks.skipped", needs=Capability.DATA_PARALLEL, since=(2, 0))
    def test_ranks_skipped(self, lab: TrainLab, measured: Measured) -> None:
        """A gradient that is not finite in a row of one rank skips the step on all ranks; later steps are not
        affected."""
        case, good, other = data_case(lab), steps_of(FEW, 3), rows_of(FEW, seed=45)
        # Tokens of the upper half: only one rank has the vocabulary rows whose gradient overflows.
        other = other.with_tokens(input_ids=64 + other["input_ids"] % 64)
        case = replace(case, optim=EVERYTHING)
        plain = [act for batches in good for act in (learn(batches[0]), step)]
        expected = lab.play_split(case, plain)
        for row, value in ((0, math.nan), (1, 3e38)):
            bad = [learn(other, Unfit(int(other["row_id"][row]), value)), skip]
            ranks = lab.play_split(case, [*plain[:2], *bad, *plain[2:]])
            where = f"{value} on rank {row}"
            measured.none(f"faults, {where}", [fault for rank in ranks for fault in rank.faults])
            self._same(measured, ranks, expected, where)

    @requirement("ranks.raises", needs=Capability.DATA_PARALLEL, since=(2, 0), basic=True)
    def test_ranks_raises(self, lab: TrainLab, measured: Measured) -> None:
        """After an objective that raised on every rank, the next step is not affected."""
        case, good, other = data_case(lab), steps_of(FEW, 2), rows_of(FEW, seed=46)
        case = replace(case, rows=1)
        plain = [act for batches in good for act in (learn(batches[0]), step)]
        rows = tuple(other["row_id"].tolist())
        bad = refused("an objective that raises", learn(other, Raising(rows)), RaisedHereError)
        ranks = lab.play_split(case, [bad, *plain[:2], learn(other), bad, *plain[2:]])
        measured.none("faults", [fault for rank in ranks for fault in rank.faults])
        self._same(measured, ranks, lab.play_split(case, plain), "")

    @requirement("ranks.read_only", needs=Capability.DATA_PARALLEL, since=(2, 0))
    def test_ranks_read_only(self, lab: TrainLab, measured: Measured) -> None:
        """Passes without gradient, saving and offloading do not affect training on several ranks."""
        case, batch = data_case(lab), rows_of(UNLIKE, seed=47)
        good = steps_of(FEW, 2)
        plain: list[Act] = [act for batches in good for act in (learn(batches[0]), step)]
        script: list[Act] = []
        for at, batches in enumerate(good):
            script += [look(batch, "log_probs"), save(lab.new_folder(f"ranks-{at}"))]
            if Capability.OFFLOAD in lab.spec.capabilities:
                script += [offload(*TRAIN_PARTS), onload(*TRAIN_PARTS), learn(batches[0])]
                script += [offload(*TRAIN_PARTS), onload(*reversed(TRAIN_PARTS)), step]
            else:
                script += [learn(batches[0]), step]
        self._same(measured, lab.play_split(case, script), lab.play_split(case, plain), "")

    @requirement("ranks.checkpoint", needs=Capability.DATA_PARALLEL, since=(2, 0), basic=True)
    def test_ranks_checkpoint(self, lab: TrainLab, measured: Measured) -> None:
        """On several ranks, loading a checkpoint of step 0 or a later step replaces all state of the engine, and it
        continues exactly with other settings."""
        case = replace(data_case(lab), optim=EVERYTHING)
        plain = [act for batches in steps_of(FEW, 3) for act in (learn(batches[0]), step)]
        other = [act for batches in steps_of(FEW, 2, seed=60) for act in (learn(batches[0]), step)]
        for at in (0, 1):
            folder = lab.new_folder("ranks")
            on = lab.play_split(case, [*plain[: 2 * at], save(folder), *plain[2 * at :]])
            again = lab.play_split(case, [*other, learn(rows_of(FEW, seed=1)), load(folder), *plain[2 * at :]])
            self._same(measured, again, on, f"saved after step {at}")

    @requirement("ranks.checkpoint_heads", needs=Capability.DATA_PARALLEL, since=(2, 0))
    def test_ranks_checkpoint_heads(self, lab: TrainLab, measured: Measured) -> None:
        """On several ranks, a checkpoint of a model whose head has fewer rows than ranks continues exactly."""
        for head, name in claimed_heads(lab)[:1]:
            case = replace(data_case(lab, head=head), optim=EVERYTHING, probe=None)
            objective, folder = Weighted((name,)), lab.new_folder("ranks-head")
            plain = [act for batches in steps_of(FEW, 3) for act in (learn(batches[0], objective), step)]
            on = lab.play_split(case, [*plain[:4], save(folder), *plain[4:]])
            self._same(measured, lab.play_split(case, [load(folder), *plain[4:]]), on, name)

    @requirement("ranks.more_ranks", needs=Capability.RESHARD_ON_LOAD, since=(2, 0))
    def test_ranks_more_ranks(self, lab: TrainLab, measured: Measured) -> None:
        """A checkpoint of one rank loads on several, and the steps after it are the same except for rounding."""
        if Capability.DATA_PARALLEL not in lab.spec.capabilities:
            return measured.record("worlds tried", 0)
        case, folder = replace(data_case(lab), optim=EVERYTHING), lab.new_folder("narrow")
        plain = [act for batches in steps_of(FEW, 3) for act in (learn(batches[0]), step)]
        on = lab.play([*plain[:2], save(folder), *plain[2:]], optim=EVERYTHING)
        ranks = lab.play_split(case, [load(folder), *plain[2:]])
        worst = furthest_weight(whole(ranks), whole_of(on))
        measured.at_most("largest difference of weights", worst, lab.suite.step_tolerance)

    @requirement("ranks.export", needs=Capability.DATA_PARALLEL, since=(2, 0), basic=True)
    def test_ranks_export(self, lab: TrainLab, measured: Measured) -> None:
        """An export of several ranks is one model with the weights of all ranks, also with heads and tied weights."""
        if Capability.EXPORT not in lab.spec.capabilities:
            return measured.record("exports tried", 0)
        cases = {"log_probs": data_case(lab)}
        if (tied := lab.variant("tied")) is not None:
            cases["tied"] = data_case(lab, model=tied)
        cases |= {
            name: replace(data_case(lab, head=head), objective=Weighted((name,))) for head, name in claimed_heads(lab)
        }
        for name, case in cases.items():
            folder = lab.new_folder("ranks-export")
            ranks = lab.drive_split(replace(case, steps=steps_of(FEW), probe=None, export=str(folder)))
            measured.none(f"tensors that transformers finds missing or strange, {name}", ill_fitting(folder, case.head))
            model = plain_model_of(replace(case, model=str(folder)))
            exported = {n: p.detach() for n, p in canonical_parameters(model)[0].items()}
            measured.equal(f"largest difference of weights, {name}", furthest_weight(exported, whole(ranks)), 0.0)

    @requirement("ranks.tied", needs=Capability.DATA_PARALLEL, since=(2, 0))
    def test_ranks_tied(self, lab: TrainLab, measured: Measured) -> None:
        """Tied embeddings with a vocabulary that is not divisible by the number of ranks learn as on one rank; every
        rank with a part of the shared tensor lists its other name."""
        if (model := lab.variant("tied")) is None:
            return measured.record("models tried", 0)
        case = data_case(lab, model=model)
        ranks = lab.drive_split(case)
        lab.holds_to_plain(measured, ranks, case)
        layouts = [rank.layout for rank in ranks if rank.layout is not None]
        names = {name: shared for layout in layouts for name, shared in layout.tied.items()}
        lacking = [
            f"{name}, rank {layout.rank}"
            for layout in layouts
            for name, shared in names.items()
            if name not in layout.tied and any(meta.name == shared for meta in layout.tensors)
        ]
        measured.none("tied names that a rank does not list", lacking)

    def _same(self, measured: Measured, mine: list[Driven], theirs: list[Driven], where: str) -> None:
        """Checks that weights, and the last norm and rate of every rank, are equal, bit for bit."""
        behind = f", {where}" if where else ""
        measured.equal(f"largest difference of weights{behind}", furthest_weight(whole(mine), whole(theirs)), 0.0)
        for name in ("norms", "lrs"):
            last = [abs(getattr(a, name)[-1] - getattr(b, name)[-1]) for a, b in zip(mine, theirs, strict=True)]
            measured.equal(f"difference of the last of {name}{behind}", max(last), 0.0)


def data_case(lab: TrainLab, **fields: Any) -> Case:
    """A case with two steps of few rows over data-parallel ranks."""
    case = split_case(lab, Capability.DATA_PARALLEL, default={})
    steps = steps_of(FEW)
    return lab.case(options=case.options, **{"steps": steps, "probe": None, **fields})


def steps_of(lengths: tuple[int, ...], number: int = 2, *, seed: int = 50, **fields: Any) -> list[list[Any]]:
    return [[rows_of(lengths, seed=seed + at, **fields)] for at in range(number)]


def furthest_copy(ranks: list[Driven]) -> float:
    """Largest difference of an element between ranks that hold it."""
    together, worst = whole(ranks), 0.0
    for rank in ranks:
        alone = whole([replace(rank, layout=rank.layout)])
        for name, values in alone.items():
            off = (values - together[name]).abs()
            worst = max(worst, float(torch.nan_to_num(off, nan=0.0).max()) if off.numel() else 0.0)
    return worst
