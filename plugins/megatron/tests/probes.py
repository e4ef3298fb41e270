"""What a case may do with an engine in place of the usual steps. Each runs on every rank of a world."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from worlds import OBJECTIVES, Case, drive, share, spec_of

from rlsdk.interfaces import Batch, Objective, ObjectiveResult, OptimSpec, RankContext, TrainSpec
from rlsdk.kit.guards.guarded_train import GuardedTrainEngine
from rlsdk.testing.process.models import random_batch


def start(ctx: RankContext, spec: TrainSpec) -> Any:
    from rlsdk_megatron.engine import MegatronTrainEngine

    engine = GuardedTrainEngine(MegatronTrainEngine())
    engine.initialize(ctx, spec)
    return engine


def step(engine: Any, *, seed: int, objective: Objective = OBJECTIVES["log_probs"]) -> Any:
    place = engine.parallel
    engine.forward_backward(share(random_batch(11, seed=seed), place.dp_rank, place.dp_size), objective)
    return engine.optim_step()


def weights(engine: Any) -> dict[tuple[str, object], torch.Tensor]:
    return {(shard.name, shard.box): shard.tensor.clone() for shard in engine.shards()}


def same(a: Mapping[Any, torch.Tensor], b: Mapping[Any, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(tensor, b[key]) for key, tensor in a.items())


def error_of(action: Any) -> Exception | None:
    try:
        action()
    except Exception as error:
        return error
    return None


@dataclass(frozen=True)
class InfiniteOnOneRank:
    """A loss that is not a number where row 0 is."""

    outputs: Sequence[str] = ("log_probs",)

    def __call__(self, outputs: Mapping[str, torch.Tensor], batch: Batch) -> ObjectiveResult:
        loss = outputs["log_probs"].sum()
        return ObjectiveResult(loss=loss * math.nan if 0 in batch["row_id"].tolist() else loss)


@dataclass
class Broken:
    """Raises in its second micro-batch."""

    outputs: Sequence[str] = ("log_probs",)
    calls: int = 0

    def __call__(self, outputs: Mapping[str, torch.Tensor], batch: Batch) -> ObjectiveResult:
        self.calls += 1
        if self.calls == 2:
            raise ArithmeticError("no loss")
        return ObjectiveResult(loss=outputs["log_probs"].sum())


def skipped_step(case: Case, ctx: RankContext) -> dict[str, Any]:
    """A gradient that is not finite on one rank, then a good one."""
    engine = start(ctx, spec_of(case, case.options))
    before = weights(engine)
    bad = step(engine, seed=10, objective=InfiniteOnOneRank())
    unchanged = same(weights(engine), before)
    good = step(engine, seed=10)
    after = weights(engine)
    engine.close()
    fresh = start(ctx, spec_of(case, case.options))
    expected = step(fresh, seed=10)
    equal = same(weights(fresh), after)
    fresh.close()
    return {"bad": bad, "unchanged": unchanged, "good": good, "expected": expected, "same": equal}


def failed_objective(case: Case, ctx: RankContext) -> dict[str, Any]:
    """Raised on the last stage, with the first in the middle of its schedule; then everything goes on."""
    engine = start(ctx, spec_of(case, case.options))
    batch = random_batch(11, seed=3)
    error = error_of(lambda: engine.forward_backward(batch, Broken()))
    good = step(engine, seed=10)
    engine.close()
    fresh = start(ctx, spec_of(case, case.options))
    expected = step(fresh, seed=10)
    fresh.close()
    return {"failure": error, "good": good, "expected": expected}


def chunked(case: Case, ctx: RankContext) -> dict[str, Any]:
    """Few logits at a time, each computed again in the backward pass."""
    from rlsdk.kit.model import logit_chunks
    from rlsdk_megatron.engine import MegatronTrainEngine

    engine = MegatronTrainEngine()
    with patch.dict(logit_chunks.MAX_LOGITS, cpu=64 * 5):
        engine.initialize(ctx, spec_of(case, case.options))
        found = drive(engine, case)
    engine.close()
    return found


def frozen(case: Case, ctx: RankContext) -> dict[str, Any]:
    """A reference model."""
    engine = start(ctx, replace(spec_of(case, case.options), optim=None))
    batch = random_batch(11, seed=3)
    found = {
        "before": engine.forward(batch, ("log_probs", "entropy")),
        "train": error_of(lambda: engine.forward_backward(batch, OBJECTIVES["log_probs"])),
        "reset": error_of(lambda: engine.reset_optimizer(OptimSpec())),
        "head": error_of(lambda: engine.forward(batch, ("values",))),
    }
    engine.close()
    return found


def offloaded(case: Case, ctx: RankContext) -> dict[str, Any]:
    """What needs a part that is away is refused; everything is there again afterwards."""
    engine = start(ctx, spec_of(case, case.options))
    before = weights(engine)
    engine.offload()
    found: dict[str, Any] = {
        "layout": bool(engine.layout().boxes),
        "refused": [
            error_of(lambda: list(engine.shards())),
            error_of(lambda: engine.forward(random_batch(2), ("log_probs",))),
            error_of(engine.optim_step),
        ],
        "unknown": error_of(lambda: engine.offload(("weight",))),
    }
    engine.onload()
    found["same"] = same(weights(engine), before)
    found["norm"] = step(engine, seed=10).grad_norm
    engine.close()
    return found


def reset(case: Case, ctx: RankContext) -> dict[str, Any]:
    """A new optimizer in the middle, against an engine that began with it and the same weights."""
    engine = start(ctx, spec_of(case, case.options))
    step(engine, seed=10)
    before, precise = weights(engine), copies(engine)
    engine.reset_optimizer(OptimSpec(lr=1e-2, warmup_steps=4))
    kept = same(weights(engine), before) and same(copies(engine), precise)
    finer = any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in precise.values())
    report = step(engine, seed=11)
    moved = max(float((after - before[key]).abs().max()) for key, after in weights(engine).items())
    engine.close()
    return {"kept": kept, "finer": finer, "lr": report.lr, "moved": moved}


def copies(engine: Any) -> dict[int, torch.Tensor]:
    """What the optimizer steps, by its place among the rank's parameters: float32, with bits that weights lack."""
    return {at: slot.main.clone() for at, (_, slot) in enumerate(engine.engine._slots())}


def two_roles(case: Case, ctx: RankContext) -> dict[str, Any]:
    """A trained and a frozen engine in one process share the groups; the first that leaves does not take them along."""
    actor = start(ctx, spec_of(case, case.options))
    frozen = replace(spec_of(case, case.options), optim=None)
    ref = start(replace(ctx, role="ref"), frozen)
    batch = random_batch(11, seed=3)
    first = ref.forward(batch, ("log_probs",))
    step(actor, seed=10)
    second = ref.forward(batch, ("log_probs",))
    trained = actor.forward(batch, ("log_probs",))
    odd = error_of(lambda: start(replace(ctx, role="odd"), replace(frozen, options=None)))
    ref.close()
    again = actor.forward(batch, ("log_probs",))
    actor.close()
    return {"first": first, "second": second, "trained": trained, "again": again, "odd": odd}


def kwargs(case: Case, ctx: RankContext) -> dict[str, Any]:
    """Raw settings reach Megatron's configuration; unknown ones are named."""
    spec = spec_of(case, case.options)
    engine = start(ctx, replace(spec, engine_kwargs={"layernorm_epsilon": 0.5}))
    reached = engine.engine.stages[0].config.layernorm_epsilon
    engine.close()
    return {"reached": reached, "odd": error_of(lambda: start(ctx, replace(spec, engine_kwargs={"layer_norm": 1})))}


def exported_in_parts(case: Case, ctx: RankContext) -> dict[str, Any]:
    """Bytes of whole tensors that this rank was given to write, in an export of many files."""
    from rlsdk_megatron.checkpoint import Gathering

    engine, fetch, given = start(ctx, spec_of(case, case.options)), Gathering.fetch, list[int]()

    def counted(self: Gathering, name: str, writer: int, dtype: torch.dtype) -> torch.Tensor | None:
        found = fetch(self, name, writer, dtype)
        given.extend([found.nbytes] if found is not None else [])
        return found

    with patch.object(Gathering, "fetch", counted), patch("rlsdk.kit.files.export.MAX_FILE_BYTES", 60_000):
        engine.save_pretrained(Path(str(case.export)))
    engine.close()
    return {"given": sum(given)}


def opened(case: Case, ctx: RankContext) -> list[str]:
    """Files that this rank opens to load a checkpoint."""
    from rlsdk_megatron import checkpoint

    engine, names, open_file = start(ctx, spec_of(case, case.options)), list[str](), checkpoint.safe_open

    def counted(path: Path, *args: Any, **options: Any) -> Any:
        names.append(path.name)
        return open_file(path, *args, **options)

    with patch.object(checkpoint, "safe_open", counted):
        engine.load_checkpoint(Path(str(case.load)))
    engine.close()
    return names


def damaged(case: Case, ctx: RankContext) -> dict[str, Any]:
    """What each damaged checkpoint is refused with, and whether it changed anything."""
    engine = start(ctx, spec_of(case, case.options))
    before = weights(engine)
    folder = Path(str(case.load))
    errors = {path.name: error_of(lambda path=path: engine.load_checkpoint(path)) for path in sorted(folder.iterdir())}
    unchanged = same(weights(engine), before)
    engine.close()
    return {"errors": errors, "unchanged": unchanged}


def adapter(case: Case, ctx: RankContext) -> dict[str, Any]:
    """The reference is asked first of all; then training, a kept reference, exports, and a checkpoint of it."""
    folder, spec = Path(case.export or ""), spec_of(case, case.options)
    mine = random_batch(11, seed=3)

    def log_probs(engine: Any, method: str = "forward") -> torch.Tensor:
        found: torch.Tensor = getattr(engine, method)(mine, ("log_probs",)).get("log_probs", torch.zeros(1))
        return found

    plain = start(ctx, replace(spec, optim=None, model=replace(spec.model, adapter=None)))
    base = log_probs(plain)
    plain.close()
    engine = start(ctx, spec)
    found = {"first": torch.equal(log_probs(engine, "forward_reference"), base)}
    norms = [step(engine, seed=seed).grad_norm for seed in (10, 20)]
    found["norms"] = norms
    found["off"] = torch.equal(log_probs(engine, "forward_reference"), base)
    found["moved"] = engine.moved_share()
    held: Any = engine.engine
    found["held"] = {
        part: sum(t.nbytes for t in held._tensors_of(part)) for part in ("weights", "optimizer", "gradients")
    }
    found["base with gradients"] = [n for one in held.held for n in ("main_grad", "grad") if hasattr(one.parameter, n)
                                    and getattr(one.parameter, n) is not None]  # fmt: skip
    kept = log_probs(engine)
    engine.keep_reference()
    step(engine, seed=30)
    found["kept"] = torch.equal(log_probs(engine, "forward_reference"), kept)
    for export in ("adapter", "merged"):
        object.__setattr__(held.adapter.adapter.spec, "export", export)
        engine.save_pretrained(folder / f"exported_{export}")
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
