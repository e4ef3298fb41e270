"""Requirements: calls that one rank may make alone, and collective calls."""

from __future__ import annotations

import functools
import math
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rlsdk.interfaces import (
    Capability,
    CheckpointError,
    TrainEngine,
)
from rlsdk.testing.process.worlds import Seat
from rlsdk.testing.suites.requirements import Measured, requirement
from rlsdk.testing.train.call_sequences import Act, learn, load, read, refused, reset, save, skip, step
from rlsdk.testing.train.case_runner import drive, share, whole
from rlsdk.testing.train.cases import EVERYTHING, Case, Driven, Weighted, rows_of
from rlsdk.testing.train.lab import TrainLab, claimed_heads, furthest_weight, whole_of
from rlsdk.testing.train.objectives import Comparing, RaisedHereError, Raising, Unfit
from rlsdk.testing.train.plain_steps import drive_plain, plain_model_of, plain_numbers
from rlsdk.testing.train.requirements.models import LINEAR, moved
from rlsdk.testing.train.requirements.ranks import FEW, data_case, steps_of
from rlsdk.testing.train.requirements.settings import infinite_slope

DEADLINE_S, DEADLINE_SLACK_S = 5.0, 10.0
"""`timeout_s` of an engine, and seconds after it in which its call must have ended."""


class RankCallRequirements:
    """Mixed into `TrainConformance`."""

    @requirement("ranks.frozen", needs=Capability.DATA_PARALLEL, since=(2, 0))
    def test_ranks_frozen(self, lab: TrainLab, measured: Measured) -> None:
        """Frozen models on several ranks, with and without heads, give the outputs of plain transformers."""
        batch = rows_of((*FEW, 1), seed=49, masked=True, temperature=0.7)
        probes: list[tuple[dict[str, Any], str]] = [({}, "log_probs")]
        probes += [({"head": head}, name) for head, name in claimed_heads(lab)]
        for fields, name in probes:
            case = replace(data_case(lab, **fields), optim=None, steps=[], probe=(batch, (name,)), rows=2)
            with torch.no_grad():
                numbers = plain_numbers(plain_model_of(case), case.head, batch)
            expected = Driven(outputs={name: numbers[name]}, row_ids=batch["row_id"].tolist(),
                              lengths=batch.lengths.tolist())  # fmt: skip
            lab.holds(measured, lab.drive_split(case), expected, name, weights=False)

    @requirement("ranks.bfloat16", needs=Capability.DATA_PARALLEL, since=(2, 0))
    def test_ranks_bfloat16(self, lab: TrainLab, measured: Measured) -> None:
        """With training in bfloat16 on several ranks, a step is that of one rank except for rounding, and master
        weights are float32."""
        if "bfloat16" not in lab.spec.dtypes:
            return measured.record("dtypes tried", 0)
        case = data_case(
            lab, steps=[[rows_of(FEW, seed=42), rows_of((3, 40), seed=43)]], optim=LINEAR, dtype="bfloat16"
        )
        start = whole([lab.play([], dtype="bfloat16")])
        one = moved(lab.drive(steps=case.steps, optim=LINEAR, dtype="bfloat16"), start)
        ranks = lab.drive_split(case)
        several = _moved_together(ranks, start)
        measured.at_most("difference from one rank, relative", float((several - one).norm() / one.norm()), 0.05)
        dtypes = {str(tensor.dtype) for rank in ranks for _, _, tensor in rank.shards}
        measured.record("dtypes of what is held", len(dtypes))
        return None

    @requirement("ranks.not_collective", needs=Capability.DATA_PARALLEL, since=(2, 0))
    def test_ranks_not_collective(self, lab: TrainLab, measured: Measured) -> None:
        """`layout`, `shards` and `parallel` are not collective: one rank can read them alone."""
        case = data_case(lab)
        plain: list[Act] = [act for batches in case.steps for act in (learn(batches[0]), step)]
        script: list[Act] = [read_on_rank_1, plain[0], read_on_rank_1, *plain[1:], read_on_rank_1]
        found, expected = lab.play_split(case, script), lab.play_split(case, plain)
        measured.none("faults", [fault for rank in found for fault in rank.faults])
        measured.equal("largest difference of weights", furthest_weight(whole(found), whole(expected)), 0.0)

    @requirement("ranks.raises_one", needs=Capability.DATA_PARALLEL, since=(2, 0))
    def test_ranks_raises_one(self, lab: TrainLab, measured: Measured) -> None:
        """An exception of an objective on one rank is raised there, the other ranks raise too, and later steps are not
        affected."""
        case, good, other = replace(data_case(lab), rows=1), steps_of(FEW, 2), rows_of(FEW, seed=46)
        plain: list[Act] = [act for batches in good for act in (learn(batches[0]), step)]
        for at in (0, 1):
            bad = raised_on(learn(other, Raising((int(other["row_id"][at]),))), at)
            found = lab.play_split(case, [bad, *plain[:2], learn(other), bad, *plain[2:]])
            measured.none(f"faults, rank {at}", [fault for rank in found for fault in rank.faults])
            off = furthest_weight(whole(found), whole(lab.play_split(case, plain)))
            measured.equal(f"largest difference of weights, rank {at}", off, 0.0)

    @requirement("ranks.infinite", needs=Capability.DATA_PARALLEL, since=(2, 0))
    def test_ranks_infinite(self, lab: TrainLab, measured: Measured) -> None:
        """A gradient with a few infinite elements, even one, is skipped by every rank, whichever rank has them."""
        case, good, other = replace(data_case(lab), optim=EVERYTHING), steps_of(FEW, 3), rows_of(FEW, seed=45)
        plain: list[Act] = [act for batches in good for act in (learn(batches[0]), step)]
        expected = lab.play_split(case, plain)
        tried = 0
        for half in (0, 64):
            batch = other.with_tokens(input_ids=half + other["input_ids"] % 64)
            for row in batch["row_id"].tolist()[:2]:
                if not (slope := infinite_slope(lab, batch, row)):
                    continue
                tried += 1
                ranks = lab.play_split(case, [*plain[:2], learn(batch, Unfit(row, slope)), skip, *plain[2:]])
                where = f"tokens from {half} on, row {row}"
                measured.none(f"faults, {where}", [fault for rank in ranks for fault in rank.faults])
                off = furthest_weight(whole(ranks), whole(expected))
                measured.equal(f"largest difference of weights, {where}", off, 0.0)
        measured.record("gradients tried", tried)
        fragile = _fragile_model(lab)
        row = int(other["row_id"][2])
        if fragile is not None and (slope := infinite_slope(lab, other, row, fragile)):
            single, bad = replace(case, model=fragile), learn(other, Unfit(row, slope))
            ranks, untouched = (lab.play_split(single, script) for script in ([bad, skip], []))
            measured.none("faults, one element", [fault for rank in ranks for fault in rank.faults])
            off = furthest_weight(whole(ranks), whole(untouched))
            measured.equal("largest difference of weights, one element", off, 0.0)

    @requirement("ranks.random_state", needs=Capability.DATA_PARALLEL, since=(2, 0))
    def test_ranks_random_state(self, lab: TrainLab, measured: Measured) -> None:
        """A checkpoint restores each rank's own random state."""
        found = lab.several.run(drawn_again, data_case(lab), str(lab.new_folder("ranks-random")))
        off = [float((first - second).abs().max()) for first, second in found]
        measured.equal("largest difference of numbers drawn", max(off), 0.0)
        measured.at_least("difference of two ranks' numbers", float((found[0][0] - found[1][0]).abs().max()), 1e-6)

    @requirement("ranks.damaged", needs=Capability.DATA_PARALLEL, since=(2, 0))
    def test_ranks_damaged(self, lab: TrainLab, measured: Measured) -> None:
        """A checkpoint of several ranks that lacks a file, or has a truncated one, is a CheckpointError on every rank;
        all continue unaffected."""
        case, folder = replace(data_case(lab), optim=EVERYTHING), lab.new_folder("ranks-whole")
        plain: list[Act] = [act for batches in steps_of(FEW, 3) for act in (learn(batches[0]), step)]
        expected = lab.play_split(case, [*plain[:2], save(folder), *plain[2:]])
        asked = []
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            for how, damage in (("missing", Path.unlink), ("truncated", cut_in_half)):
                copy = lab.new_folder("ranks-hurt") / "checkpoint"
                shutil.copytree(folder, copy)
                damage(copy / file.relative_to(folder))
                asked.append(refused(f"a checkpoint with {file.name} {how}", load(copy), CheckpointError))
        found = lab.play_split(case, [*plain[:4], *asked, *plain[4:]])
        measured.none("faults", [fault for rank in found for fault in rank.faults])
        off = furthest_weight(whole(found), whole(expected))
        measured.equal("largest difference of weights after refusals", off, 0.0)
        rates = [abs(a - b) for rank in found for a, b in zip(rank.lrs, expected[0].lrs, strict=True)]
        measured.equal("largest difference of the rate after refusals", max(rates), 0.0)

    @requirement("ranks.reset", needs=Capability.DATA_PARALLEL, since=(2, 0))
    def test_ranks_reset(self, lab: TrainLab, measured: Measured) -> None:
        """`reset_optimizer` resets every rank, as on one rank."""
        if not lab.can_reset:
            return measured.record("engines that can be reset", 0)
        case = data_case(lab)
        script: list[Act] = [act for batches in steps_of(FEW, 2) for act in (learn(batches[0]), step)]
        again = [*script, reset(EVERYTHING), *script]
        ranks, one = lab.play_split(case, again), lab.play(again)
        worst = furthest_weight(whole(ranks), whole_of(one))
        measured.at_most("largest difference of weights from one rank", worst, lab.suite.step_tolerance)
        rates = [abs(a - b) for rank in ranks for a, b in zip(rank.lrs, one.lrs, strict=True)]
        measured.at_most("largest difference of the rate", max(rates), 1e-9)
        return None

    @requirement("ranks.whole_groups", needs=Capability.DATA_PARALLEL, since=(2, 0))
    def test_ranks_whole_groups(self, lab: TrainLab, measured: Measured) -> None:
        """Rows of equal `uid` stay in one pass on every rank, however the other ranks split theirs."""
        # Each group is on one rank, as the controller sends them; the first rank also has the last two rows. Ranks have
        # the same number of groups, or one has more and makes more passes than the other.
        mine = torch.tensor([0 if at >= 6 else at % 2 for at in range(8)])
        for name, groups in (("as many", [0, 0, 1, 1, 0, 0, 1, 0]), ("more", [0, 0, 1, 0, 2, 0, 2, 0])):
            batch = rows_of((5, 9, 3, 12, 7, 7, 2, 10), seed=5).with_rows(uid=mine * 4 + torch.tensor(groups))
            case = replace(data_case(lab), steps=[[batch]], objective=Comparing(), probe=None)
            expected = drive_plain(replace(case, steps=[[batch]]))
            for rows in (None, 1, 2):
                ranks = lab.drive_split(replace(case, rows=rows))
                lab.holds(measured, ranks, expected, f"{name} groups, {rows or 'all'} rows a pass")

    @requirement("ranks.deadline", needs=Capability.DATA_PARALLEL, since=(2, 0))
    def test_ranks_deadline(self, lab: TrainLab, measured: Measured) -> None:
        """A rank that waits in a call that another rank does not make raises an error after `timeout_s`; it does not
        wait until that rank ends. (Only tried on a CPU: NCCL ends the process then.)"""
        if lab.suite.device != "cpu":
            return measured.record("devices tried", 0)
        sign = lab.new_folder("deadline") / "it has raised"
        waited = lab.several.run(wait_for_last, replace(data_case(lab), rows=2), str(sign))
        measured.at_most("seconds of a rank that waits", max(waited), DEADLINE_S + DEADLINE_SLACK_S)
        return None

    @requirement("ranks.close", needs=Capability.DATA_PARALLEL, since=(2, 0))
    def test_ranks_close(self, lab: TrainLab, measured: Measured) -> None:
        """`close` leaves the process group, and later engines in the same processes join a new one."""
        case = data_case(lab)
        for turn in range(2):
            left = lab.several.run(stays_in_group, case)
            still = [at for at, stays in enumerate(left) if stays]
            measured.none(f"ranks that are still in a process group, engine {turn}", still)


def read_on_rank_1(engine: TrainEngine, found: Driven) -> None:
    """Only rank 1 reads its weights."""
    if engine.parallel.dp_rank == 1:
        read(engine, found)


def raised_on(act: Act, rank: int) -> Act:
    """The act must raise: the objective's error on that rank, and any error on the others."""
    return functools.partial(_raised_on, act, rank)


def _raised_on(act: Act, rank: int, engine: TrainEngine, found: Driven) -> None:
    here = engine.parallel.dp_rank
    try:
        act(engine, found)
    except RaisedHereError:
        return
    except Exception as error:
        if here == rank:
            found.faults.append(f"rank {here}: {type(error).__name__} in place of what the objective raised")
        return
    found.faults.append(f"rank {here} of an objective that raised on rank {rank} raised nothing")


def drawn_again(seat: Seat, case: Case, folder: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers that a rank draws after a save, and after loading it; each rank has its own seed."""
    state = torch.get_rng_state()
    engine = seat.start(case.spec)
    try:
        torch.manual_seed(900 + seat.rank)
        engine.save_checkpoint(Path(folder))
        first = torch.rand(8)
        torch.manual_seed(7)
        engine.load_checkpoint(Path(folder))
        return first, torch.rand(8)
    finally:
        engine.close()
        torch.set_rng_state(state)


def wait_for_last(seat: Seat, case: Case, sign: str) -> float:
    """Seconds that a rank waited in a step that the last rank does not take, until it raised; infinite if it did not.
    The last rank lives until then, but not for ever."""
    engine = seat.start(case.spec, timeout_s=DEADLINE_S)
    start, raised = time.monotonic(), Path(sign)
    try:
        if seat.rank == seat.size - 1:
            while not raised.exists() and time.monotonic() - start < DEADLINE_S + 2 * DEADLINE_SLACK_S:
                time.sleep(0.05)
            return 0.0
        try:
            engine.forward_backward(share(engine, rows_of(FEW, seed=50)), Weighted())
            engine.optim_step()
        except Exception:
            return time.monotonic() - start
        return math.inf
    finally:
        raised.touch()
        engine.close()


def cut_in_half(file: Path) -> None:
    """Drops the second half of a file."""
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def stays_in_group(seat: Seat, case: Case) -> bool:
    """Whether this process is still in a group after an engine was closed."""
    drive(seat, case)
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _moved_together(ranks: list[Driven], start: dict[str, torch.Tensor]) -> torch.Tensor:
    after = whole(ranks)
    return torch.cat([(after[name] - start[name]).flatten() for name in sorted(start)])


def _fragile_model(lab: TrainLab) -> str | None:
    """A model in which only the gradient of the first weight of the last norm overflows; None: the suite's model has no
    such tensors."""
    folder = shutil.copytree(lab.model, lab.new_folder("fragile"), dirs_exist_ok=True)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if {"lm_head.weight", "model.norm.weight"} <= tensors.keys():
            # The two factors cancel in the pass.
            tensors["lm_head.weight"][:, 0] *= 1e36
            tensors["model.norm.weight"][0] *= 1e-36
            save_file(tensors, file, metadata={"format": "pt"})
            return str(folder)
    return None
