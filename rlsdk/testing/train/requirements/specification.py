"""Requirements: an engine follows its TrainSpec, refuses unknown settings, and does not change checkpoints that it
loads."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rlsdk.interfaces import (
    Batch,
    Capability,
    ConfigError,
    Head,
    TrainEngine,
    TrainSpec,
)
from rlsdk.kit.ranks import progress
from rlsdk.testing.process.worlds import Seat
from rlsdk.testing.suites.requirements import Measured, requirement
from rlsdk.testing.train.call_sequences import Act, learn, load, look, save, step
from rlsdk.testing.train.case_runner import drive, share
from rlsdk.testing.train.cases import OPTIM, Case, Driven, rows_of
from rlsdk.testing.train.lab import TrainLab, claimed_heads, furthest_weight, whole_of
from rlsdk.testing.train.requirements.settings import script_of, three_batches

SAVES = 4
"""Number of checkpoints that are written while a thread reads weights."""
LATER_S = 0.3
"""Seconds in which a background thread of the engine would make visible progress with writing."""


class SpecificationRequirements:
    """Mixed into `TrainConformance`."""

    @requirement("model.seeds", since=(2, 0))
    def test_model_seeds(self, lab: TrainLab, measured: Measured) -> None:
        """Random weights, including a new head's, depend on `RankContext.seed`: equal seeds give equal weights, other
        seeds other ones; weights that were read do not depend on it."""
        fields: dict[str, dict[str, Any]] = {"random": {"random": True}, "read": {}}
        for head, name in claimed_heads(lab)[:1]:
            fields[f"a new head of {name}"] = {"head": head, "model": lab.model}
        for name, given in fields.items():
            one, same, other = (lab.run(started_with, lab.case(**given), seed) for seed in (3, 3, 4))
            measured.equal(
                f"largest difference of one seed, {name}", furthest_weight(whole_of(one), whole_of(same)), 0.0
            )
            worst = furthest_weight(whole_of(one), whole_of(other))
            if name == "read":
                measured.equal(f"largest difference of two seeds, {name}", worst, 0.0)
            else:
                measured.at_least(f"largest difference of two seeds, {name}", worst, 1e-4)

    @requirement("model.recomputes", since=(2, 0))
    def test_model_recomputes(self, lab: TrainLab, measured: Measured) -> None:
        """With `activation_checkpointing`, and only with it, layers run again in the backward pass. (For layers that
        are modules of torch.)"""
        batch = three_batches()[0]
        plain, again = (lab.run(module_calls, lab.case(checkpointing=asked), batch) for asked in (False, True))
        measured.record("calls of modules without it", plain)
        if plain:
            measured.at_least("calls of modules with it, over those without", again / plain, 1.2)

    @requirement("outputs.all_masked", since=(2, 0))
    def test_all_masked(self, lab: TrainLab, measured: Measured) -> None:
        """A batch, a row and a pass without any token of the policy have outputs of 0 and no gradient; other passes of
        the step are not affected."""
        batch = rows_of((8, 3, 13), seed=15)
        nothing = batch.with_tokens(response_mask=torch.zeros(batch.num_tokens, dtype=torch.bool))
        found = lab.play([look(nothing, "log_probs")]).seen[0]["log_probs"]
        measured.equal("largest log-prob", float(found.abs().max()), 0.0)
        partly = batch.with_tokens(response_mask=batch.row_of_token == 1)
        case = lab.case(steps=[[nothing, batch], [partly], [batch, nothing]], rows=1)
        lab.holds_to_plain(measured, [lab.run(drive, case)], case)

    @requirement("refusals.settings", since=(2, 0))
    def test_refusals_settings(self, lab: TrainLab, measured: Measured) -> None:
        """A wrong specification is a ConfigError: no limit of a micro-batch, a limit below 1, an unknown schedule, a
        decaying schedule without a number of steps, an unknown dtype, unknown raw arguments, and a head that is not
        claimed. An engine that was refused, or never initialized, can be closed, even twice."""
        heads = {Head.VALUE: Capability.VALUE_HEAD, Head.SCORE: Capability.SCORE_HEAD}
        missing = [head for head, capability in heads.items() if capability not in lab.spec.capabilities]
        measured.none("accepted", lab.run(contradictions, lab.case(), missing))

    @requirement("shards.beside_saves", since=(2, 0))
    def test_shards_beside_saves(self, lab: TrainLab, measured: Measured) -> None:
        """While a checkpoint or an export is written, another thread reads unchanged weights from `shards`."""
        exports = Capability.EXPORT in lab.spec.capabilities
        for dtype in sorted({"float32", "bfloat16"} & lab.spec.dtypes):
            folders = [str(lab.new_folder("beside")) for _ in range(SAVES)]
            rounds, changed = lab.run(read_beside_saves, lab.case(dtype=dtype), three_batches()[0], folders, exports)
            measured.at_least(f"times that all were read, {dtype}", rounds, 1)
            measured.none(f"weights that were others meanwhile, {dtype}", changed)

    @requirement("progress", since=(2, 0))
    def test_progress(self, lab: TrainLab, measured: Measured) -> None:
        """Passes without gradient report progress for each micro-batch, and an export for each tensor, because
        deadlines count from the last report."""
        batch, folder = rows_of((5, 3, 8, 1, 6, 4), seed=16), lab.new_folder("progress")
        exports = Capability.EXPORT in lab.spec.capabilities
        passes, tensors, reported = lab.run(reports_of, lab.case(rows=1), batch, str(folder) if exports else None)
        measured.at_least(f"reports of {batch.num_rows} passes", passes, batch.num_rows)
        if exports:
            measured.at_least("reports of an export, less its tensors", reported - tensors, 0)

    @requirement("checkpoint.only_reads", since=(2, 0))
    def test_checkpoint_only_reads(self, lab: TrainLab, measured: Measured) -> None:
        """Loading a checkpoint does not add or remove files in its folder."""
        folder, batches = lab.new_folder("read"), three_batches()
        lab.play([*script_of(batches[:1]), save(folder)])
        before = sorted(path.relative_to(folder) for path in folder.rglob("*"))
        lab.play([load(folder), *script_of(batches[1:])])
        measured.equal("files", sorted(path.relative_to(folder) for path in folder.rglob("*")) != before, 0)
        around = [path.name for path in folder.parent.iterdir() if folder.name in path.name and path != folder]
        measured.none("files beside it", around)

    @requirement("checkpoint.on_disk", since=(2, 0))
    def test_checkpoint_on_disk(self, lab: TrainLab, measured: Measured) -> None:
        """When `save_checkpoint` returns, the whole checkpoint is on disk: nothing is written later, while the engine
        continues to train."""
        batches = three_batches()
        folders = [lab.new_folder(f"disk-{at}") for at in range(2)]
        script: list[Act] = []
        for batch, folder in zip(batches, folders, strict=False):
            script += [learn(batch), step, functools.partial(_saved_at_once, folder)]
        measured.none("faults", lab.play([*script, learn(batches[2]), step]).faults)


def read_beside_saves(
    seat: Seat, case: Case, batch: Batch, folders: Sequence[str], exports: bool
) -> tuple[int, list[str]]:
    """How often another thread read all shards while checkpoints and exports were written, and the shards that
    changed."""
    engine, done, rounds = seat.start(case.spec), threading.Event(), 0
    changed: list[str] = []
    try:
        engine.forward_backward(share(engine, batch), case.objective)
        engine.optim_step()
        expected = [shard.tensor.detach().cpu().clone() for shard in engine.shards()]

        def read() -> None:
            nonlocal rounds
            while not done.is_set():
                for shard, known in zip(engine.shards(), expected, strict=True):
                    found = shard.tensor.detach().cpu()
                    if found.dtype != known.dtype or not torch.equal(found, known):
                        changed.append(shard.name)
                rounds += 1

        reader = threading.Thread(target=read)
        reader.start()
        try:
            for folder in folders:
                engine.save_checkpoint(Path(folder))
                if exports:
                    engine.save_pretrained(Path(f"{folder}-export"))
        finally:
            done.set()
            reader.join()
        return rounds, sorted(set(changed))
    finally:
        engine.close()


def reports_of(seat: Seat, case: Case, batch: Batch, folder: str | None) -> tuple[int, int, int]:
    """Number of progress reports in a `forward`, of the engine's tensors, and of reports in an export of them."""
    engine = seat.start(case.spec)
    try:
        with counted_reports() as passes:
            engine.forward(share(engine, batch), ("log_probs",))
        with counted_reports() as written:
            if folder is not None:
                engine.save_pretrained(Path(folder))
        return passes[0], len(engine.layout().tensors), written[0]
    finally:
        engine.close()


@contextmanager
def counted_reports() -> Iterator[list[int]]:
    """Counts progress reports within this context."""
    counts = [0]

    class Clock:
        last = progress._Clock.last

        def __setattr__(self, name: str, value: float) -> None:
            counts[0] += 1
            object.__setattr__(self, name, value)

    held = progress._Clock
    progress._Clock = Clock()  # type: ignore[assignment,misc]
    try:
        yield counts
    finally:
        held.last = progress._Clock.last
        progress._Clock = held  # type: ignore[misc]


def started_with(seat: Seat, case: Case, seed: int) -> Driven:
    """The weights of an engine that was started with this seed of the run."""
    engine = seat.start(case.spec, seed=seed)
    try:
        found = Driven(layout=engine.layout())
        found.shards = [(shard.name, shard.box, shard.tensor.detach().cpu().clone()) for shard in engine.shards()]
        return found
    finally:
        engine.close()


def module_calls(seat: Seat, case: Case, batch: Batch) -> int:
    """Number of calls of torch modules in one `forward_backward`."""
    from torch.nn.modules.module import register_module_forward_pre_hook

    engine = seat.start(case.spec)
    calls = 0

    def count(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        nonlocal calls
        calls += 1

    hook = register_module_forward_pre_hook(count)
    try:
        engine.forward_backward(batch, case.objective)
        return calls
    finally:
        hook.remove()
        engine.close()


def contradictions(seat: Seat, case: Case, missing: Sequence[Head]) -> list[str]:
    """Wrong specifications that were accepted; `missing`: heads that are not claimed."""
    spec, optim = case.spec, OPTIM
    wrong: dict[str, TrainSpec] = {
        "no limit of a micro-batch": replace(spec, micro_batch_rows=None, micro_batch_tokens=None),
        "micro_batch_rows 0": replace(spec, micro_batch_rows=0, micro_batch_tokens=None),
        "micro_batch_tokens 0": replace(spec, micro_batch_rows=None, micro_batch_tokens=0),
        "micro_batch_tokens -1": replace(spec, micro_batch_rows=None, micro_batch_tokens=-1),
        "a schedule that does not exist": replace(spec, optim=replace(optim, schedule="cosign", total_steps=5)),  # type: ignore[arg-type]
        "linear without total_steps": replace(spec, optim=replace(optim, schedule="linear")),
        "cosine without total_steps": replace(spec, optim=replace(optim, schedule="cosine")),
        "a warm-up before it": replace(spec, optim=replace(optim, schedule="cosine", warmup_steps=2)),
        "a dtype that there is not": replace(spec, model=replace(spec.model, dtype="float31")),
        "a dtype that there is not, frozen": replace(spec, model=replace(spec.model, dtype="float31"), optim=None),
        "an argument that there is not": replace(spec, engine_kwargs={"there_is_no_such_argument": 1}),
        **{f"head {head.value}": replace(spec, model=replace(spec.model, head=head)) for head in missing},
    }
    accepted = []
    for name, given in wrong.items():
        try:
            seat.start(given).close()
            accepted.append(name)
        except ConfigError:
            continue
        except Exception as error:
            accepted.append(f"{name}: {type(error).__name__}: {error}")
    engine = seat.engine()
    engine.close()
    engine.close()
    return accepted


def _saved_at_once(folder: Path, engine: TrainEngine, found: Driven) -> None:
    """Saves, and compares the folder immediately and a little later."""
    engine.save_checkpoint(folder)
    first = _contents(folder)
    time.sleep(LATER_S)
    later = _contents(folder)
    found.faults += [] if first else ["save_checkpoint returned before anything was written"]
    found.faults += [
        f"{name} was written after save_checkpoint returned" for name in later if later[name] != first.get(name)
    ]


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
