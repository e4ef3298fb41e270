"""What a case may do with an engine in place of the usual steps. Each runs on every rank of a world."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from worlds import OBJECTIVES, Case, share, spec_of

from rlsdk.interfaces import Batch, Objective, ObjectiveResult, OptimSpec, RankContext, RlsdkError, TrainSpec
from rlsdk.kit.guards.guarded_train import GuardedTrainEngine
from rlsdk.testing.process.models import random_batch


def start(ctx: RankContext, spec: TrainSpec) -> Any:
    from rlsdk_fsdp.engine import FsdpTrainEngine

    engine = GuardedTrainEngine(FsdpTrainEngine())
    engine.initialize(ctx, spec)
    return engine


def step(engine: Any, ctx: RankContext, *, seed: int, objective: Objective = OBJECTIVES["log_probs"]) -> Any:
    engine.forward_backward(share(random_batch(11, seed=seed), ctx.rank, ctx.world_size), objective)
    return engine.optim_step()


def weights(engine: Any) -> dict[str, torch.Tensor]:
    return {shard.name: shard.tensor.clone() for shard in engine.shards()}


def error_of(action: Any) -> Exception | None:
    try:
        action()
    except Exception as error:
        return error
    return None


@dataclass(frozen=True)
class InfiniteOnOneRank:
    """A loss that is not a number on the rank that has row 0."""

    outputs: Sequence[str] = ("log_probs",)

    def __call__(self, outputs: Mapping[str, torch.Tensor], batch: Batch) -> ObjectiveResult:
        loss = outputs["log_probs"].sum()
        return ObjectiveResult(loss=loss * math.nan if 0 in batch["row_id"].tolist() else loss)


def skipped_step(case: Case, ctx: RankContext) -> dict[str, Any]:
    """A gradient that is not finite on one rank, then a good one."""
    engine = start(ctx, spec_of(case))
    before = weights(engine)
    bad = step(engine, ctx, seed=10, objective=InfiniteOnOneRank())
    unchanged = all(torch.equal(tensor, before[name]) for name, tensor in weights(engine).items())
    good = step(engine, ctx, seed=10)
    after = weights(engine)
    engine.close()
    fresh = start(ctx, spec_of(case))
    expected = step(fresh, ctx, seed=10)
    same = all(torch.equal(tensor, after[name]) for name, tensor in weights(fresh).items())
    fresh.close()
    return {"bad": bad, "unchanged": unchanged, "good": good, "expected": expected, "same": same}


def frozen(case: Case, ctx: RankContext) -> dict[str, Any]:
    """A reference model."""
    engine = start(ctx, replace(spec_of(case), optim=None))
    batch = share(random_batch(11, seed=3), ctx.rank, ctx.world_size)
    found = {
        "before": engine.forward(batch, ("log_probs",))["log_probs"],
        "dtypes": {meta.dtype for meta in engine.layout().tensors},
        "train": error_of(lambda: engine.forward_backward(batch, OBJECTIVES["log_probs"])),
        "reset": error_of(lambda: engine.reset_optimizer(OptimSpec())),
    }
    engine.close()
    return found


def offloaded(case: Case, ctx: RankContext) -> dict[str, Any]:
    """What is refused while parts are away, and that all comes back."""
    engine = start(ctx, spec_of(case))
    before, layout = weights(engine), engine.layout()
    batch = share(random_batch(11, seed=3), ctx.rank, ctx.world_size)
    engine.offload(("weights",))
    engine.offload(("weights", "optimizer"))
    found = {
        "layout": engine.layout() == layout,
        "shards": error_of(lambda: list(engine.shards())),
        "forward": error_of(lambda: engine.forward(batch, ("log_probs",))),
        "step": error_of(engine.optim_step),
        "unknown": error_of(lambda: engine.offload(("wieghts",))),
    }
    engine.onload()
    found["same"] = all(torch.equal(tensor, before[name]) for name, tensor in weights(engine).items())
    found["norm"] = step(engine, ctx, seed=10).grad_norm
    engine.close()
    engine.close()
    return found


def reset(case: Case, ctx: RankContext) -> dict[str, Any]:
    """A new optimizer in the middle: as if the engine had been built from these weights."""
    engine = start(ctx, spec_of(case))
    step(engine, ctx, seed=10)
    before = weights(engine)
    engine.reset_optimizer(OptimSpec(lr=1e-2, warmup_steps=4))
    kept = all(torch.equal(tensor, before[name]) for name, tensor in weights(engine).items())
    state = len(engine.engine.optimizer.state)
    lr = step(engine, ctx, seed=11).lr
    engine.close()
    return {"kept": kept, "state": state, "lr": lr}


def refusals(case: Case, ctx: RankContext) -> dict[str, Exception | None]:
    """What cannot be built; the group of processes is there all the same."""
    good = spec_of(case)
    wrong = {
        "kwargs": replace(good, engine_kwargs={"reshard_after_fwd": True}),
        "options": replace(good, options={"replicate_size": 1}),
        "limits": replace(good, micro_batch_rows=2, micro_batch_tokens=2),
        "float16": replace(good, model=replace(good.model, dtype="float16")),
        "weights": replace(good, model=replace(good.model, path=str(Path(case.model).parent / "no_weights"))),
        "shapes": replace(good, model=replace(good.model, path=str(Path(case.model).parent / "mixed_up"))),
    }
    return {name: error_of(lambda spec=spec: start(ctx, spec)) for name, spec in wrong.items()}


def disk_refuses(case: Case, ctx: RankContext) -> dict[str, Exception | None]:
    """Folders that cannot be written: under a file."""
    engine = start(ctx, spec_of(case))
    nowhere = Path(case.model) / "config.json" / "folder"
    found = {
        "export": error_of(lambda: engine.save_pretrained(nowhere)),
        "save": error_of(lambda: engine.save_checkpoint(nowhere)),
    }
    found["alive"] = error_of(lambda: step(engine, ctx, seed=10))
    engine.close()
    return found


def damaged(case: Case, ctx: RankContext) -> dict[str, Exception | None]:
    """Every folder under `case.load` holds a checkpoint with another fault."""
    engine = start(ctx, spec_of(case))
    folders = sorted(path for path in Path(case.load or "").iterdir() if path.is_dir())
    before = weights(engine)
    found = {path.name: error_of(lambda path=path: engine.load_checkpoint(path)) for path in folders}
    kept = all(torch.equal(tensor, before[name]) for name, tensor in weights(engine).items())
    found["weights changed"] = None if kept else RlsdkError("weights changed")
    engine.close()
    return found


def exported_in_parts(case: Case, ctx: RankContext) -> dict[str, Any]:
    """Bytes of whole tensors that this rank was given to write, in an export of many files."""
    from rlsdk_fsdp.shards import Piece

    engine, gather, given = start(ctx, spec_of(case)), Piece.gather, list[int]()

    def counted(piece: Piece, writer: int, dtype: torch.dtype) -> torch.Tensor | None:
        found = gather(piece, writer, dtype)
        given.extend([found.nbytes] if found is not None else [])
        return found

    with patch.object(Piece, "gather", counted), patch("rlsdk.kit.files.export.MAX_FILE_BYTES", 60_000):
        engine.save_pretrained(Path(str(case.export)))
    engine.close()
    return {"given": sum(given), "largest": max(given, default=0)}


def opened(case: Case, ctx: RankContext) -> list[str]:
    """Files that this rank opens to load a checkpoint."""
    import safetensors

    engine, names, open_file = start(ctx, spec_of(case)), list[str](), safetensors.safe_open

    def counted(filename: Any, *args: Any, **options: Any) -> Any:
        names.append(Path(filename).name)
        return open_file(filename, *args, **options)

    with patch("safetensors.safe_open", counted):
        engine.load_checkpoint(Path(str(case.load)))
    engine.close()
    return names


def kwargs(case: Case, ctx: RankContext) -> list[bool]:
    """Which shards of matrices are cut along their columns by a function that went to torch's own constructor."""
    from torch.distributed.tensor import Shard

    def by_columns(parameter: torch.nn.Parameter) -> Shard:
        return Shard(parameter.dim() - 1)

    engine = start(ctx, replace(spec_of(case), engine_kwargs={"shard_placement_fn": by_columns}))
    norm = step(engine, ctx, seed=10).grad_norm
    layout = engine.layout()
    shapes = {meta.name: meta.shape for meta in layout.tensors}
    cut = [box.size[0] == shapes[name][0] for name, box in layout.boxes if len(shapes[name]) == 2]
    engine.close()
    return [*cut, math.isfinite(norm)]


def adapter(case: Case, ctx: RankContext) -> dict[str, Any]:
    """The reference is asked first of all; then training, a kept reference, exports, and a checkpoint of it."""
    folder, spec = Path(case.export or ""), spec_of(case)
    mine = share(random_batch(11, seed=3), ctx.rank, ctx.world_size)

    def log_probs(engine: Any, method: str = "forward") -> torch.Tensor:
        found: torch.Tensor = getattr(engine, method)(mine, ("log_probs",))["log_probs"]
        return found

    plain = start(ctx, replace(spec, optim=None, model=replace(spec.model, adapter=None)))
    base = log_probs(plain)
    plain.close()
    engine = start(ctx, spec)
    found = {"first": torch.equal(log_probs(engine, "forward_reference"), base)}
    norms = [step(engine, ctx, seed=seed).grad_norm for seed in (10, 20)]
    found["norms"] = norms
    found["off"] = torch.equal(log_probs(engine, "forward_reference"), base)
    found["moved"] = engine.moved_share()
    held: Any = engine.engine
    found["held"] = {part: sum(t.nbytes for t in held._tensors_of(part)) for part in ("weights", "optimizer")}
    kept = log_probs(engine)
    engine.keep_reference()
    step(engine, ctx, seed=30)
    found["kept"] = torch.equal(log_probs(engine, "forward_reference"), kept)
    for name, export in (("adapter", "adapter"), ("merged", "merged")):
        assert engine.engine.adapter is not None
        object.__setattr__(engine.engine.adapter.adapter.spec, "export", export)
        engine.save_pretrained(folder / f"exported_{name}")
    saved = folder / "saved_kept"
    saved.mkdir(exist_ok=True)
    engine.save_checkpoint(saved)
    found |= {"after": log_probs(engine), "row_ids": mine["row_id"], "lengths": mine.lengths}
    engine.close()
    resumed = start(ctx, spec)
    resumed.load_checkpoint(saved)
    found["resumed"] = torch.equal(log_probs(resumed, "forward_reference"), kept)
    found["equal"] = torch.equal(log_probs(resumed), found["after"])
    resumed.close()
    other = start(ctx, replace(spec, model=replace(spec.model, dtype="bfloat16")))
    found["refused"] = error_of(lambda: other.load_checkpoint(saved))
    other.close()
    return found
