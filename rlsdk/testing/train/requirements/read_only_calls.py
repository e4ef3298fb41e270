"""Requirements: calls that only read, are refused, or move memory never change training."""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, cycle, permutations
from pathlib import Path

from rlsdk.interfaces import Capability, CheckpointError, ConfigError, Head
from rlsdk.kit.memory.memory_parts import TRAIN_PARTS
from rlsdk.testing.process.resources import grown, num_tensors, objects, only_new_objects, resident_handles
from rlsdk.testing.process.worlds import Seat
from rlsdk.testing.suites.requirements import Measured, requirement
from rlsdk.testing.train.call_sequences import (
    Act,
    export,
    export_alone,
    learn,
    load,
    look,
    offload,
    onload,
    play,
    read,
    refused,
    reset,
    save,
    save_in_a_sync,
    see_layout,
    skip,
    step,
)
from rlsdk.testing.train.cases import EVERYTHING, Case, Driven, rows_of
from rlsdk.testing.train.lab import TrainLab, furthest_weight, whole_of
from rlsdk.testing.train.objectives import RaisedHereError, Raising, Unfit
from rlsdk.testing.train.plain_steps import drive_plain
from rlsdk.testing.train.requirements.outputs import numbers
from rlsdk.testing.train.requirements.settings import three_batches

SPARE_HANDLES = 3
"""Number of threads or files that a library may open once, late."""
ROUNDS = 8
UNKNOWN = replace(EVERYTHING, schedule="cosign")  # type: ignore[arg-type]


class ReadOnlyRequirements:
    """Mixed into `TrainConformance`."""

    @requirement("read_only.forward", since=(2, 0), basic=True)
    def test_read_only_forward(self, lab: TrainLab, measured: Measured) -> None:
        """Passes without gradient do not affect a step; each gives the log-probs of the current weights, the same when
        repeated, in tensors that later calls do not change."""
        batch = rows_of((12, 1, 30, 6), seed=1)
        script, batches = [look(batch, "log_probs"), look(batch, "log_probs")], three_batches()
        for one in batches:
            script += [learn(one), look(batch, "log_probs"), step, look(batch, "log_probs")]
        found = self._leaves_no_trace(lab, measured, script)
        seen = [outputs["log_probs"] for outputs in found.seen]
        measured.equal("largest difference of a second call", float((seen[0] - seen[1]).abs().max()), 0.0)
        for at in range(3):
            moved = float((seen[1 + 2 * at] - seen[2 + 2 * at]).abs().max())
            measured.equal(f"largest change before step {at}", moved, 0.0)
            plain = drive_plain(
                lab.case(steps=[[b] for b in batches[: at + 1]], probe=(batch, ("log_probs",)), optim=EVERYTHING)
            )
            worst = float((seen[3 + 2 * at] - plain.outputs["log_probs"]).abs().max())
            measured.at_most(f"largest difference from plain after step {at}", worst, lab.suite.tolerance)

    @requirement("read_only.layout", since=(2, 0))
    def test_read_only_layout(self, lab: TrainLab, measured: Measured) -> None:
        """`layout` never changes, `shards` are in its order, and reading them does not affect training."""
        script = [act for b in three_batches() for act in (read, learn(b), read, step)]
        found = self._leaves_no_trace(lab, measured, [*script, read])
        layout = found.layout
        assert layout is not None
        dtypes = {meta.name: meta.dtype for meta in layout.tensors}
        wrong = [n for n, b, t in found.shards if str(t.dtype) != f"torch.{dtypes[n]}" or tuple(t.shape) != b.size]
        measured.none("shards of another dtype or size than their box", wrong)

    @requirement("read_only.no_rows", since=(2, 0))
    def test_read_only_no_rows(self, lab: TrainLab, measured: Measured) -> None:
        """A batch without rows is valid: its loss is 0, and it does not affect the step of other batches."""
        batches = three_batches()
        nothing = batches[0].select([])
        script = [
            act
            for batch in batches
            for act in (learn(nothing), learn(batch), look(nothing, "log_probs"), learn(nothing), step)
        ]
        found = self._leaves_no_trace(lab, measured, script, calls=slice(1, None, 3))
        of_nothing = [result.loss for at, result in enumerate(found.results) if at % 3 != 1]
        measured.none("losses of nothing that are not 0", [loss for loss in of_nothing if loss != 0.0])

    @requirement("read_only.save", since=(2, 0))
    def test_read_only_save(self, lab: TrainLab, measured: Measured) -> None:
        """Saving, even while a sync is half-way through the weights, and exporting do not affect training."""
        can_export = Capability.EXPORT in lab.spec.capabilities
        script = []
        for at, batch in enumerate(three_batches()):
            script += [save(lab.new_folder(f"save-{at}")), learn(batch), save_in_a_sync(lab.new_folder(f"sync-{at}"))]
            script += [export(lab.new_folder(f"export-{at}"))] if can_export else []
            script += [step]
        self._leaves_no_trace(lab, measured, script)

    @requirement("offload.any_time", needs=Capability.OFFLOAD, since=(2, 0))
    def test_offload_any_time(self, lab: TrainLab, measured: Measured) -> None:
        """Each part, any two, and all can be offloaded at every point of a step while they are not needed: log-probs
        need only weights, and `forward_backward` needs no moments."""
        batch, batches = rows_of((12, 5), seed=1), three_batches()
        expected = lab.play([look(batch, "log_probs")]).seen[0]["log_probs"]
        rest = ("optimizer", "gradients")
        script: list[Act] = [offload(*rest), look(batch, "log_probs"), onload(*rest)]
        subsets = [parts for size in (1, 2, 3) for parts in combinations(TRAIN_PARTS, size)]
        offloaded: list[Act] = [act for parts in subsets for act in (offload(*parts), onload(*reversed(parts)))]
        for at, one in enumerate(batches):
            # Once per step: a part that is swapped twice would be back in place.
            before, behind = (offloaded, []) if at % 2 else ([], offloaded)
            script += [*before, offload("optimizer"), learn(one), onload("optimizer"), *behind]
            script += [offload(*TRAIN_PARTS), *(onload(part) for part in TRAIN_PARTS), step]
        found = self._leaves_no_trace(lab, measured, script)
        measured.equal("largest difference", float((found.seen[0]["log_probs"] - expected).abs().max()), 0.0)

    @requirement("offload.changed", needs=Capability.OFFLOAD, since=(2, 0))
    def test_offload_changed(self, lab: TrainLab, measured: Measured) -> None:
        """Parts that were offloaded before, and changed since by a checkpoint, a reset or a step, are restored with
        their latest values."""
        first, second, third = three_batches()
        folder, lent = lab.new_folder("lent"), [offload(*TRAIN_PARTS), onload(*TRAIN_PARTS)]
        before: list[Act] = [learn(first), step, save(folder), learn(second), step]
        changes: dict[str, list[Act]] = {"a checkpoint": [load(folder)], "a step": [learn(third), step]}
        if lab.can_reset:
            changes["a reset"] = [reset(EVERYTHING)]
        for name, change in changes.items():
            rest = [learn(third), step]
            expected = lab.play([*before, *change, *rest], optim=EVERYTHING, witness=False)
            found = lab.play([*before, *lent, *change, *lent, *rest], optim=EVERYTHING, witness=False)
            off = furthest_weight(whole_of(found), whole_of(expected))
            measured.equal(f"largest difference of weights, changed by {name}", off, 0.0)

    @requirement("offload.partial", needs=Capability.OFFLOAD, since=(2, 0))
    def test_offload_partial(self, lab: TrainLab, measured: Measured) -> None:
        """Parts that left together come back in any order, with calls in between that do not need the others: layouts,
        outputs, shards, exports, checkpoints, and further gradients of the step. Steps are as without, bit for bit."""
        exports, batches = Capability.EXPORT in lab.spec.capabilities, cycle(three_batches())
        plain, script = list[Act](), list[Act]()
        orders = [order for size in (1, 2, 3) for order in permutations(TRAIN_PARTS, size)]
        for order in orders:
            first = [learn(next(batches))]
            script += [*first, offload(*sorted(order))]
            for back in range(len(order)):
                away = order[back:]
                found: list[Act] = [see_layout]
                if "weights" not in away:
                    found = [look(rows_of((7, 2), seed=1), "log_probs"), read]
                    found += [export(lab.new_folder("half"))] if exports else []
                    found += [save(lab.new_folder("half"))] if "optimizer" not in away else []
                    if "gradients" not in away:
                        first.append(learn(next(batches)))
                        found.append(first[-1])
                script += [*found, onload(order[back])]
            script.append(step)
            plain += [*first, step]
        optim = replace(EVERYTHING, lr=0.2 * EVERYTHING.lr)
        expected, found_run = (lab.play(one, optim=optim) for one in (plain, script))
        norms = sum(a != b for a, b in zip(found_run.norms, expected.norms, strict=True))
        measured.equal("norms that differ", norms, 0)
        off = furthest_weight(whole_of(found_run), whole_of(expected))
        measured.equal("largest difference of weights", off, 0.0)

    @requirement("offload.frozen", needs=Capability.OFFLOAD, since=(2, 0))
    def test_offload_frozen(self, lab: TrainLab, measured: Measured) -> None:
        """A frozen model's weights can be offloaded and restored, and its log-probs do not change."""
        batch = rows_of((12, 5), seed=1)
        looking = look(batch, "log_probs")
        found = lab.play([looking, offload(*TRAIN_PARTS), onload(*TRAIN_PARTS), looking, read], optim=None)
        first, second = (outputs["log_probs"] for outputs in found.seen)
        measured.equal("largest difference", float((first - second).abs().max()), 0.0)
        worst = float((second - numbers(lab.case(), batch)["log_probs"]).abs().max())
        measured.at_most("largest difference from plain", worst, lab.suite.tolerance)

    @requirement("frozen.heads", needs=Capability.SCORE_HEAD, since=(2, 0))
    def test_frozen_heads(self, lab: TrainLab, measured: Measured) -> None:
        """A frozen model gives the outputs of a trained one: with temperature and mask, and the scores of a reward
        model."""
        batch = rows_of((12, 1, 5), seed=1, masked=True, temperature=0.7)
        for head, name in ((Head.LM, "log_probs"), (Head.SCORE, "scores")):
            for rows in (None, 1):
                found = lab.play([look(batch, name)], optim=None, head=head, rows=rows).seen[0][name]
                worst = float((found - numbers(lab.case(head=head), batch)[name]).abs().max())
                measured.at_most(
                    f"largest difference of {name}, {rows or 'all'} rows a pass", worst, lab.suite.tolerance
                )

    @requirement("resources", since=(2, 0))
    def test_resources(self, lab: TrainLab, measured: Measured) -> None:
        """Threads, open files and tensors do not grow over engines that are built, stepped, saved, loaded and
        closed."""
        folders = [str(lab.new_folder("round")) for _ in range(ROUNDS)]
        files, threads, tensors = lab.run(many_engines, lab.case(witness=False), folders)
        measured.at_most(f"tensors that {ROUNDS} engines left", tensors, SPARE_HANDLES)
        measured.at_most(f"files that {ROUNDS} engines left open", files, SPARE_HANDLES)
        measured.at_most(f"threads that {ROUNDS} engines left", threads, SPARE_HANDLES)

    @requirement("resources.calls", since=(2, 0))
    def test_resources_calls(self, lab: TrainLab, measured: Measured) -> None:
        """What an engine holds does not grow with the number of calls, whichever they are: objects, threads and open
        files are as many after each round of passes, steps, skipped steps, objectives that raise, checkpoints (also
        refused ones), exports, times off the device, resets and layouts."""
        folder = str(lab.new_folder("calls"))
        kept, files, threads = lab.run(many_calls, lab.case(witness=False), rounds_of(lab, folder), folder)
        measured.none("objects that each round left", [f"{count} {name}" for name, count in sorted(kept.items())])
        measured.at_most(f"files that {ROUNDS} rounds left open", files, SPARE_HANDLES)
        measured.at_most(f"threads that {ROUNDS} rounds left", threads, SPARE_HANDLES)

    def _leaves_no_trace(
        self, lab: TrainLab, measured: Measured, script: Sequence[Act], calls: slice = slice(None)
    ) -> Driven:
        """Checks that the script's three steps equal those of `three_batches` alone, bit for bit."""
        expected = lab.play([act for batch in three_batches() for act in (learn(batch), step)], optim=EVERYTHING)
        found = lab.play(script, optim=EVERYTHING)
        measured.none("faults", found.faults)
        lab.holds(measured, [replace(found, results=found.results[calls])], expected)
        measured.equal("weights", furthest_weight(whole_of(found), whole_of(expected)), 0.0)
        return found


def rounds_of(lab: TrainLab, folder: str) -> list[Act]:
    """Calls of every method that a round has; each may write into folders of these names in `folder`."""
    batch = rows_of((5, 3), seed=1)
    bad, raising = int(batch["row_id"][0]), Raising(batch["row_id"].tolist())
    saved = f"{folder}/saved"
    acts: list[Act] = [look(batch, "log_probs"), learn(batch), step, learn(batch, Unfit(bad)), skip]
    acts += [refused("an objective that raises", learn(batch, raising), RaisedHereError), read]
    acts += [save(saved), load(saved), refused("an empty folder", load(f"{folder}/empty"), CheckpointError)]
    if Capability.EXPORT in lab.spec.capabilities:
        acts.append(export_alone(f"{folder}/exported"))
    if Capability.OFFLOAD in lab.spec.capabilities:
        acts += [offload(*TRAIN_PARTS), onload(*TRAIN_PARTS)]
    if lab.can_reset:
        acts += [reset(EVERYTHING), refused("a schedule that does not exist", reset(UNKNOWN), ConfigError)]
    return acts


def many_calls(seat: Seat, case: Case, acts: Sequence[Act], folder: str) -> tuple[Counter[str], int, int]:
    """Objects by which each round grew, and open files and threads that all rounds but the first two added."""
    engine, turns, before = seat.start(case.spec), list[Counter[str]](), (0, 0)
    logged = logging.root.manager.disable
    try:
        logging.disable()  # pytest keeps every record of a test
        with only_new_objects():
            for at in range(ROUNDS):
                for name in ("saved", "exported", "empty"):
                    shutil.rmtree(Path(folder) / name, ignore_errors=True)
                    (Path(folder) / name).mkdir()
                for act in acts:
                    act(engine, Driven())
                if at >= 2:
                    turns.append(objects())
                if at == 2:
                    before = resident_handles()
        after = resident_handles()
        return grown(turns), after[0] - before[0], after[1] - before[1]
    finally:
        logging.disable(logged)
        engine.close()


def many_engines(seat: Seat, case: Case, folders: Sequence[str]) -> tuple[int, int, int]:
    """Open files, threads and tensors that were added by all engines except the first two."""
    before = (0, 0, 0)
    for at, folder in enumerate(folders):
        if at == 2:
            before = (*resident_handles(), num_tensors())
        batch = rows_of((5, 3), seed=at)
        play(seat, case, [learn(batch), step, save(folder), learn(batch), step, load(folder)])
    after = (*resident_handles(), num_tensors())
    return after[0] - before[0], after[1] - before[1], after[2] - before[2]
