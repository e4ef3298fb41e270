"""Requirements: weights are exposed, saved, restored, exported, offloaded to the host, and freed."""

from __future__ import annotations

import math
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlsdk.interfaces import Batch, Box, Capability, CheckpointError, ConfigError, RankContext, RlsdkError, TrainSpec
from rlsdk.kit.model.hf import canonical_parameters
from rlsdk.testing.process.models import without_tensor
from rlsdk.testing.process.modes import kept_modes
from rlsdk.testing.process.reference import plain_outputs
from rlsdk.testing.process.resources import (
    grown,
    held,
    lasting_files,
    left_behind,
    objects,
    only_new_objects,
    own_temporary_folder,
    resident_bytes,
)
from rlsdk.testing.process.worlds import Seat
from rlsdk.testing.suites.requirements import Measured, requirement
from rlsdk.testing.train.case_runner import share, whole
from rlsdk.testing.train.cases import OPTIM, Case, Driven, Weighted, train_batch
from rlsdk.testing.train.lab import TrainLab, furthest_weight, whole_of
from rlsdk.testing.train.plain_steps import plain_model_of
from rlsdk.testing.train.requirements.gradients import three_steps

MIB = 2**20


class LifetimeRequirements:
    """Mixed into `TrainConformance`."""

    @requirement("layout", basic=True)
    def test_layout(self, lab: TrainLab, measured: Measured) -> None:
        """`layout` lists every tensor of the checkpoint; `shards` yields its boxes in order, as views of the trained
        weights, and each element exactly once."""
        found = lab.run(look_at_shards, lab.case())
        expected = {n: tuple(p.shape) for n, p in canonical_parameters(plain_model_of(lab.case()))[0].items()}
        held_shapes = found["shapes"]
        names = sorted(held_shapes.keys() | expected.keys())
        measured.none("tensors of another name or shape", [n for n in names if held_shapes.get(n) != expected.get(n)])
        measured.none("shards out of the layout's order", found["disorder"])
        elements = sum(box.numel for _, box in found["boxes"])
        measured.equal("elements", elements, sum(math.prod(shape) for shape in expected.values()))
        boxes: dict[str, list[Box]] = {}
        for name, box in found["boxes"]:
            boxes.setdefault(name, []).append(box)
        overlaps = [n for n, b in boxes.items() if any(x.intersect(y) for at, x in enumerate(b) for y in b[:at])]
        measured.none("tensors whose boxes overlap", overlaps)
        measured.none("processes that are not this one, node:pid", found["elsewhere"])
        measured.none("shards that are copies", found["copies"])
        measured.none("shards that a step did not change", found["unchanged"])

    @requirement("checkpoint.resume", basic=True)
    def test_resume(self, lab: TrainLab, measured: Measured) -> None:
        """A checkpoint continues exactly: the steps after it equal, bit for bit, those without the interruption."""
        folder = str(lab.new_folder("saved"))
        steps = [*three_steps(), *three_steps()]
        on = lab.drive(steps=steps, save=folder, save_after=3)
        again = lab.drive(steps=steps[3:], load=folder)
        measured.equal("largest difference of weights", furthest_weight(whole_of(again), whole_of(on)), 0.0)
        norms = [abs(a - b) for a, b in zip(again.norms, on.norms[3:], strict=True)]
        measured.equal("largest difference of norms", max(norms), 0.0)

    @requirement("checkpoint.schedule", basic=True)
    def test_resume_schedule(self, lab: TrainLab, measured: Measured) -> None:
        """The schedule continues from the step of the checkpoint."""
        folder = str(lab.new_folder("saved"))
        optim = replace(OPTIM, schedule="linear", warmup_steps=2, total_steps=8)
        steps = [*three_steps(), *three_steps()]
        on = lab.drive(steps=steps, save=folder, save_after=3, optim=optim)
        again = lab.drive(steps=steps[3:], load=folder, optim=optim)
        rates = [abs(a - b) for a, b in zip(again.lrs, on.lrs[3:], strict=True)]
        measured.equal("largest difference of rates", max(rates), 0.0)

    @requirement("checkpoint.damaged", basic=True)
    def test_damaged(self, lab: TrainLab, measured: Measured) -> None:
        """An empty folder, or one with truncated files, is a CheckpointError; the weights do not change."""
        folder = lab.new_folder("saved")
        lab.drive(steps=three_steps()[:2], save=str(folder), save_after=1)
        found = lab.run(load_damaged, lab.case(), str(folder), str(lab.new_folder("damaged")))
        measured.at_least("damaged folders", len(found["tried"]), 2)
        measured.none("accepted", found["accepted"])
        measured.none("weights that changed", found["changed"])

    @requirement("export", needs=Capability.EXPORT, basic=True)
    def test_export(self, lab: TrainLab, measured: Measured) -> None:
        """`save_pretrained` writes a folder that transformers can read, with the same tensors, bit for bit, and the
        same outputs."""
        folder = lab.new_folder("export")
        batch = train_batch(seed=60)
        found = lab.drive(steps=three_steps(), export=str(folder), probe=(batch, ("log_probs",)))
        model = plain_model_of(lab.case(model=str(folder)))
        exported = {name: parameter.detach() for name, parameter in canonical_parameters(model)[0].items()}
        measured.equal("largest difference of weights", furthest_weight(exported, whole_of(found)), 0.0)
        with torch.no_grad():
            expected = plain_outputs(model, batch)["log_probs"]
        worst = float((found.outputs["log_probs"] - expected).abs().max())
        measured.at_most("largest difference of log-probs", worst, lab.suite.tolerance)

    @requirement("offload", needs=Capability.OFFLOAD, basic=True)
    def test_offload(self, lab: TrainLab, measured: Measured) -> None:
        """`offload` and `onload` restore every part bit for bit, even in the middle of a step; calls that need an
        offloaded part are refused."""
        steps = three_steps()
        found = lab.run(with_offload, lab.case(steps=steps))
        plain = lab.drive(steps=steps)
        measured.none("done without weights", found["done"])
        measured.equal("largest difference of weights", furthest_weight(found["weights"], whole_of(plain)), 0.0)
        if lab.suite.device != "cpu":
            measured.at_least("MiB of the device that were freed", found["freed"] / MIB, 1)

    @requirement("frozen", basic=True)
    def test_frozen(self, lab: TrainLab, measured: Measured) -> None:
        """Without an `OptimSpec` a model only runs `forward`; training it is refused. Batches that differ only in one
        token, or only in their temperature, have different outputs."""
        batch = train_batch(seed=61)
        ids = batch["input_ids"].clone()
        ids[-1] = (ids[-1] + 1) % 128
        batches = [batch, batch.with_meta(temperature=0.6), batch.with_tokens(input_ids=ids), batch]
        seen, done = lab.run(frozen, lab.case(optim=None), batches)
        with torch.no_grad():
            plain = plain_model_of(lab.case())
            expected = [plain_outputs(plain, one)["log_probs"] for one in batches]
        off = max(float((outputs - right).abs().max()) for outputs, right in zip(seen, expected, strict=True))
        measured.at_most("largest difference", off, lab.suite.tolerance)
        measured.none("trained all the same", done)

    @requirement("refusals", basic=True)
    def test_refusals(self, lab: TrainLab, measured: Measured) -> None:
        """Wrong sizes and specifications are a ConfigError before anything is built, in every dtype; modes of torch
        stay as they were."""
        for dtype in sorted({"float32", "bfloat16"} & lab.spec.dtypes):
            accepted = lab.run(refusals, lab.case(dtype=dtype), lab.spec.max_ranks)
            measured.none(f"accepted, {dtype}", accepted)

    @requirement("memory")
    def test_memory(self, lab: TrainLab, measured: Measured) -> None:
        """Memory does not grow over fifty steps, and no Python object is kept of any."""
        steps = lab.suite.leak_steps
        added, kept = lab.run(many_steps, lab.case(), steps)
        measured.at_most(f"MiB that {steps} steps added", added, lab.suite.leak_mib)
        measured.none("objects kept all the time", [f"{count} {name}" for name, count in sorted(kept.items())])

    @requirement("close", basic=True)
    def test_close(self, lab: TrainLab, measured: Measured) -> None:
        """After steps, checkpoints and times off the device, `close` leaves no process, port, file or shared memory,
        and nothing in the temporary folder; it may be called twice, and another engine may follow."""
        case, folder = lab.case(steps=three_steps()[:1]), str(lab.new_folder("scratch"))
        left = lab.run(partial(closed_twice, moves=Capability.OFFLOAD in lab.spec.capabilities), case, folder)
        measured.none("left behind", left)


def look_at_shards(seat: Seat, case: Case) -> dict[str, Any]:
    """Reads `layout` and `shards` before and after a step."""
    engine = seat.start(case.spec)
    try:
        layout = engine.layout()
        first = [(shard.name, shard.box, shard.tensor) for shard in engine.shards()]
        disorder = [
            f"{name} {box} in the place of {expected}"
            for (name, box, _), expected in zip(first, layout.boxes, strict=False)
            if (name, box) != tuple(expected)
        ]
        if len(first) != len(layout.boxes):
            disorder.append(f"{len(first)} shards for {len(layout.boxes)} boxes")
        again = {(shard.name, shard.box): shard.tensor.data_ptr() for shard in engine.shards()}
        copies = [name for name, box, tensor in first if tensor.numel() and tensor.data_ptr() != again[name, box]]
        before = [tensor.clone() for _, _, tensor in first]
        engine.forward_backward(share(engine, train_batch(seed=70)), Weighted())
        engine.optim_step()
        after = [shard.tensor for shard in engine.shards()]
        unchanged = [first[at][0] for at, tensor in enumerate(after) if torch.equal(tensor, before[at]) and len(tensor)]
        return {
            "shapes": {meta.name: meta.shape for meta in layout.tensors},
            "boxes": list(layout.boxes),
            "elsewhere": [] if layout.process.endswith(f":{os.getpid()}") else [layout.process],
            "disorder": disorder,
            "copies": copies,
            "unchanged": unchanged,
        }
    finally:
        engine.close()


def load_damaged(seat: Seat, case: Case, saved: str, folder: str) -> dict[str, list[str]]:
    """Loads damaged copies of a checkpoint: an empty one, and ones with a file cut in half."""
    sources = sorted(path for path in Path(saved).rglob("*") if path.is_file() and path.stat().st_size > 1)
    tried = {"nothing in it": Path(folder) / "empty"}
    tried["nothing in it"].mkdir()
    for at, source in enumerate(sources):
        copy = Path(folder) / f"cut-{at}"
        shutil.copytree(saved, copy)
        cut = copy / source.relative_to(saved)
        cut.write_bytes(source.read_bytes()[: source.stat().st_size // 2])
        tried[f"{source.name} cut in half"] = copy
    engine = seat.start(case.spec)
    try:
        before = [shard.tensor.clone() for shard in engine.shards()]
        accepted = []
        for name, path in tried.items():
            try:
                engine.load_checkpoint(path)
                accepted.append(name)
            except CheckpointError:
                continue
        changed = [s.name for s, old in zip(engine.shards(), before, strict=True) if not torch.equal(s.tensor, old)]
        return {"tried": list(tried), "accepted": accepted, "changed": [] if accepted else changed}
    finally:
        engine.close()


def with_offload(seat: Seat, case: Case) -> dict[str, Any]:
    """Offloads parts at every point of a step."""
    engine = seat.start(case.spec)
    done: list[str] = []
    freed = 0
    try:
        for batches in case.steps:
            engine.offload(("optimizer",))
            for batch in batches:
                engine.forward_backward(share(engine, batch), case.objective)
            before = torch.cuda.memory_allocated() if seat.device != "cpu" else 0
            engine.offload()
            freed = max(freed, before - torch.cuda.memory_allocated() if seat.device != "cpu" else 0)
            for name, action in {"shards": lambda: list(engine.shards()), "step": engine.optim_step}.items():
                try:
                    action()
                    done.append(name)
                except RlsdkError:
                    continue
            engine.onload()
            engine.optim_step()
            engine.offload(("weights", "gradients"))
            engine.onload(("weights", "gradients"))
        held = [(shard.name, shard.box, shard.tensor.detach().cpu().clone()) for shard in engine.shards()]
        return {"done": done, "weights": whole([Driven(shards=held, layout=engine.layout())]), "freed": freed}
    finally:
        engine.close()


def frozen(seat: Seat, case: Case, batches: Sequence[Batch]) -> tuple[list[Tensor], list[str]]:
    """Log-probs of each batch, and the training calls that were accepted."""
    engine = seat.start(case.spec)
    try:
        outputs = [engine.forward(batch, ("log_probs",))["log_probs"] for batch in batches]
        done = []
        for name, action in {
            "forward_backward": lambda: engine.forward_backward(batches[0], Weighted()),
            "optim_step": engine.optim_step,
        }.items():
            try:
                action()
                done.append(name)
            except RlsdkError:
                continue
        return outputs, done
    finally:
        engine.close()


def refusals(seat: Seat, case: Case, max_ranks: int | None) -> list[str]:
    """Names of wrong specifications that were accepted."""
    model = replace(case.spec.model, path=str(Path(case.model).parent / "there-is-no-such-model"))
    lacking = without_tensor(Path(case.model), Path(case.model).parent / "lacking-model")
    wrong: dict[str, TrainSpec] = {
        "both limits of a micro-batch": replace(case.spec, micro_batch_rows=2, micro_batch_tokens=2),
        "a model that is not there": replace(case.spec, model=model),
        "files that lack a tensor": replace(case.spec, model=replace(case.spec.model, path=str(lacking))),
    }
    accepted = []
    for name, spec in wrong.items():
        try:
            seat.start(spec).close()
            accepted.append(name)
        except ConfigError:
            continue
    if max_ranks is not None:
        ctx = RankContext(role="actor", rank=0, world_size=max_ranks + 1, device=seat.device, timeout_s=5.0)
        engine = seat.engine()
        try:
            with kept_modes("initialize"):
                engine.initialize(ctx, case.spec)
            accepted.append(f"{max_ranks + 1} ranks")
        except ConfigError:
            pass
        finally:
            engine.close()
    return accepted


def many_steps(seat: Seat, case: Case, counted: int) -> tuple[float, Counter[str]]:
    """Growth of memory in MiB, and of the number of objects by type."""
    engine = seat.start(case.spec)
    try:
        warm, before, turns = counted // 5, 0, list[Counter[str]]()
        with only_new_objects():
            for step in range(warm + counted):
                if step == warm:
                    before = resident_bytes()
                if step >= warm and step % 3 == 0:
                    turns.append(objects())
                batch = share(engine, train_batch(4, seed=step, longest=12))
                engine.forward(batch, ("log_probs",))
                engine.forward_backward(batch, Weighted())
                engine.optim_step()
        return (resident_bytes() - before) / MIB, grown(turns)
    finally:
        engine.close()


def closed_twice(seat: Seat, case: Case, scratch: str, *, moves: bool) -> list[str]:
    """Resources that a second engine leaves behind in addition to those of a first one; both take steps, save and load,
    and with `moves` are off the device meanwhile."""
    saved = Path(scratch) / "saved"
    saved.mkdir()

    def live() -> None:
        engine = seat.start(case.spec)
        batch = share(engine, case.steps[0][0])
        for _ in range(2):
            engine.forward_backward(batch, Weighted())
            engine.optim_step()
            engine.forward(batch, ("log_probs",))
            if moves:
                engine.offload()
                engine.onload()
            shutil.rmtree(saved)
            saved.mkdir()
            engine.save_checkpoint(saved)
            engine.load_checkpoint(saved)
        engine.close()
        engine.close()

    live()
    with own_temporary_folder() as folder:
        before = held(Path(scratch))
        live()
        left = left_behind(before, Path(scratch))
        if not left and (first := os.listdir(folder)):
            live()
            left = [f"in the temporary folder: {name}" for name in lasting_files(folder, first)]
    return left
