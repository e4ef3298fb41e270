"""Requirements: engines in one process (roles of one worker) do not affect each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from rlsdk.interfaces import Capability, Head, TrainEngine
from rlsdk.testing.process.worlds import Seat
from rlsdk.testing.suites.requirements import Measured, requirement
from rlsdk.testing.train.call_sequences import Act, learn, load, look, save, step
from rlsdk.testing.train.case_runner import record_final_state, whole
from rlsdk.testing.train.cases import EVERYTHING, OPTIM, Case, Driven, Weighted, rows_of
from rlsdk.testing.train.comparison import compared
from rlsdk.testing.train.lab import TrainLab, furthest_weight, whole_of
from rlsdk.testing.train.requirements.ranks import FEW, data_case, steps_of
from rlsdk.testing.train.requirements.settings import three_batches


class IsolationRequirements:
    """Mixed into `TrainConformance`."""

    @requirement("isolation", since=(2, 0), basic=True)
    def test_isolation(self, lab: TrainLab, measured: Measured) -> None:
        """Two engines in one process, each in the middle of its steps, give the same results as alone: with different
        optimizers and temperatures, frozen, with different heads; both may be offloaded at the same time, and one
        continues when the other is closed."""
        batches, probe = three_batches(), rows_of((12, 1, 5), seed=1)
        mine = lab.case(optim=EVERYTHING, rows=2)
        script = [learn(batches[0]), step, learn(batches[1]), look(probe, "log_probs"), step, learn(batches[2]), step]
        others: dict[str, tuple[Case, list[Act]]] = {
            "a trained one": (
                lab.case(optim=replace(OPTIM, lr=3e-2, betas=(0.5, 0.7), max_grad_norm=0.02)),
                [
                    learn(rows_of((9, 3), seed=5, temperature=0.7)),
                    step,
                    learn(rows_of((4, 6), seed=6, masked=True)),
                    step,
                ],
            ),
            "a frozen one": (lab.case(optim=None), [look(probe.with_meta(temperature=1.7), "log_probs")] * 4),
        }
        if Capability.VALUE_HEAD in lab.spec.capabilities:
            others["a value model"] = (
                lab.case(head=Head.VALUE, rows=1),
                [look(probe, "values"), learn(batches[1], Weighted(("values",))), step, look(probe, "values")],
            )
        alone = lab.play(script, optim=EVERYTHING, rows=2)
        for name, (theirs, their_script) in others.items():
            moves = Capability.OFFLOAD in lab.spec.capabilities
            found, beside = lab.run(in_one_process, mine, script, theirs, their_script, moves)
            _same(measured, found, alone, f"beside {name}")
            fields = {"optim": theirs.optim, "head": theirs.head, "rows": theirs.rows}
            _same(measured, beside, lab.play(their_script, **fields), name)

    @requirement("isolation.ranks", needs=Capability.DATA_PARALLEL, since=(2, 0))
    def test_isolation_ranks(self, lab: TrainLab, measured: Measured) -> None:
        """Two engines on the same ranks give the same results as alone; when one is closed, the other keeps its process
        group."""
        case, batch = data_case(lab), rows_of(FEW, seed=48)
        script = [act for batches in steps_of(FEW, 3) for act in (learn(batches[0]), step)]
        frozen = replace(case, optim=None)
        looking = [look(batch, "log_probs")] * 3
        together = lab.several.run(in_one_process, case, script, frozen, looking)
        alone, seen = lab.play_split(case, script), lab.play_split(frozen, looking)
        mine, theirs = ([pair[at] for pair in together] for at in (0, 1))
        measured.none("faults", [fault for rank in (*mine, *theirs) for fault in rank.faults])
        measured.equal("largest difference of weights", furthest_weight(whole(mine), whole(alone)), 0.0)
        norms = [(a.norms, b.norms) for a, b in zip(mine, alone, strict=True)]
        measured.equal("ranks whose norms differ", sum(a != b for a, b in norms), 0)
        for rank, (one, two) in enumerate(zip(theirs, seen, strict=True)):
            _same_outputs(measured, one, two, f"the frozen one on rank {rank}")

    @requirement("isolation.checkpoints", since=(2, 0))
    def test_isolation_checkpoints(self, lab: TrainLab, measured: Measured) -> None:
        """When one engine of a process loads a checkpoint, the other does not change; each saves its own state."""
        batches, folder, own = three_batches(), lab.new_folder("other"), lab.new_folder("own")
        lab.play([learn(batches[2]), step, save(folder)], optim=EVERYTHING)
        script = [learn(batches[0]), step, save(own), learn(batches[1]), step]
        mine = lab.case(optim=EVERYTHING)
        other: list[Act] = [load(folder), learn(batches[1]), step, load(folder)]
        found, _ = lab.run(in_one_process, mine, script, mine, other)
        expected = lab.play([act for act in script if act is not script[2]], optim=EVERYTHING)
        _same(measured, found, expected, "beside one that loaded")
        _same(measured, lab.play([load(own), *script[3:]], optim=EVERYTHING), expected, "from its own", last=1)


def in_one_process(
    seat: Seat,
    mine: Case,
    script: Sequence[Act],
    theirs: Case,
    their_script: Sequence[Act],
    moves: bool = False,
) -> tuple[Driven, Driven]:
    """Runs the scripts of two engines alternately: the second engine starts in the middle of the first's script, and is
    closed before the first's last call. With `moves`, both are off the device together after each of the second's."""
    found, beside = Driven(), Driven()
    first = compared(seat.start(mine.spec), mine, found.apart)
    second: TrainEngine | None = None
    try:
        with torch.enable_grad():
            script[0](first, found)
            second = compared(seat.start(theirs.spec, role="other"), theirs, beside.apart)
            for at in range(max(len(script) - 2, len(their_script))):
                if at < len(their_script):
                    their_script[at](second, beside)
                    if moves:
                        for engine in (first, second):
                            engine.offload()
                        for engine in (first, second):
                            engine.onload()
                if at + 1 < len(script) - 1:
                    script[at + 1](first, found)
            record_final_state(second, theirs, beside)
            second.close()
            script[-1](first, found)
            record_final_state(first, mine, found)
        return found, beside
    finally:
        if second is not None:
            second.close()
        first.close()


def _same(measured: Measured, mine: Driven, theirs: Driven, where: str, *, last: int = 100) -> None:
    """Checks that weights, norms and outputs are equal, bit for bit."""
    measured.none(f"faults, {where}", mine.faults)
    measured.equal(f"largest difference of weights, {where}", furthest_weight(whole_of(mine), whole_of(theirs)), 0.0)
    norms = zip(mine.norms[-last:], theirs.norms[-last:], strict=True)
    measured.equal(f"largest difference of norms, {where}", max((abs(a - b) for a, b in norms), default=0.0), 0.0)
    _same_outputs(measured, mine, theirs, where)


def _same_outputs(measured: Measured, mine: Driven, theirs: Driven, where: str) -> None:
    for one, two in zip(mine.seen, theirs.seen, strict=True):
        off = max((float((one[n] - two[n]).abs().max()) for n in two if two[n].numel()), default=0.0)
        measured.equal(f"largest difference of outputs, {where}", off, 0.0)
