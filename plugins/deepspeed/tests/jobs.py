"""What ranks do in these tests: picklable functions of a seat (`rlsdk.testing.process.worlds`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rlsdk.algorithms.objectives.policy import PolicyObjective
from rlsdk.interfaces import Batch, Head, ModelSpec, OptimSpec, RankContext, TrainEngine, TrainSpec
from rlsdk.kit.ranks.shared_memory import find_block
from rlsdk.testing.process.models import random_batch
from rlsdk.testing.process.worlds import SEED, Seat
from rlsdk_deepspeed.config import DeepSpeedOptions

NUM_ROWS = 11
# A large eps: Adam divides by the root of the squared gradient, and where that is 0 but for rounding, the sign of the
# step would be rounding's too.
OPTIM = OptimSpec(lr=1e-3, weight_decay=0.1, eps=1e-3, schedule="cosine", warmup_steps=2, total_steps=8)


@dataclass(frozen=True)
class Case:
    """An engine, and what is done with it."""

    model: str
    options: DeepSpeedOptions = field(default_factory=DeepSpeedOptions)
    dtype: str = "float32"
    checkpointing: bool = False
    calls: int = 1
    """`forward_backward` calls before each step."""
    lonely: bool = False
    """Rank 0 gets every row, the others none."""
    load: str | None = None
    """A checkpoint after two steps; the third step follows."""
    save: str | None = None
    """Where, after two steps."""
    export: str | None = None
    """Where, at the end."""

    @property
    def spec(self) -> TrainSpec:
        return TrainSpec(
            model=ModelSpec(path=self.model, dtype=self.dtype, head=Head.LM),
            optim=OPTIM,
            micro_batch_rows=3,
            activation_checkpointing=self.checkpointing,
            options=self.options,
        )


def share(batch: Batch, rank: int, world: int, *, lonely: bool = False) -> Batch:
    """Uneven shares: rank r takes rows r, r + world, ..., but rank 0 takes the last two."""
    if lonely:
        return batch.select(range(batch.num_rows) if rank == 0 else [])
    owner = [0 if at >= batch.num_rows - 2 else at % world for at in range(batch.num_rows)]
    return batch.select([at for at, who in enumerate(owner) if who == rank])


def drive(engine: TrainEngine, case: Case) -> dict[str, Any]:
    """Three steps, the third of them alone if a checkpoint is loaded: what engines can be compared in."""
    place, objective = engine.parallel, PolicyObjective(entropy_coef=0.01)
    found: dict[str, Any] = {"losses": [], "norms": [], "lrs": []}
    if case.load:
        engine.load_checkpoint(Path(case.load))
    for step in range(2 if case.load else 0, 3):
        if step == 2 and case.save:
            engine.save_checkpoint(Path(case.save))
        for call in range(case.calls):
            rows = random_batch(NUM_ROWS, seed=10 * step + call)
            mine = share(rows, place.dp_rank, place.dp_size, lonely=case.lonely)
            found["losses"].append(engine.forward_backward(mine, objective).loss)
        # What a pass gathers right before a step must not be there after it.
        engine.forward(mine, ("log_probs",))
        report = engine.optim_step()
        found["norms"].append(report.grad_norm)
        found["lrs"].append(report.lr)
    mine = share(random_batch(NUM_ROWS, seed=3), place.dp_rank, place.dp_size, lonely=case.lonely)
    found["log_probs"] = dict(zip(mine["row_id"].tolist(), split(engine, mine), strict=True))
    if case.export:
        engine.save_pretrained(Path(case.export))
    found["shards"] = [(s.name, s.box, s.tensor.clone()) for s in engine.shards()]
    found["private"] = [s.name for s in engine.shards() if find_block(s.tensor) is None]
    found["layout"] = engine.layout()
    found["random"] = torch.rand(3)
    return found


def split(engine: TrainEngine, rows: Batch) -> tuple[torch.Tensor, ...]:
    return engine.forward(rows, ("log_probs",))["log_probs"].split(rows.lengths.tolist())


def train(seat: Seat, case: Case) -> dict[str, Any]:
    engine = seat.start(case.spec)
    try:
        return drive(engine, case)
    finally:
        engine.close()


def plain(case: Case) -> dict[str, Any]:
    """The same by one process of the built-in engine."""
    from dataclasses import replace

    from rlsdk.reference.torch_engine import TorchTrainEngine

    engine = TorchTrainEngine()
    engine.initialize(RankContext(role="actor", seed=SEED), replace(case.spec, options=None))
    return drive(engine, replace(case, load=None, save=None, export=None, lonely=False))


def load_damaged(seat: Seat, case: Case, folders: list[str]) -> dict[str, Any]:
    """The error of each folder, and whether weights are as before."""
    engine = seat.start(case.spec)
    try:
        before = [s.tensor.clone() for s in engine.shards()]
        found: dict[str, Any] = {
            folder: error_of(lambda at=folder: engine.load_checkpoint(Path(at))) for folder in folders
        }
        found["kept"] = all(torch.equal(s.tensor, old) for s, old in zip(engine.shards(), before, strict=True))
        return found
    finally:
        engine.close()


def refused(seat: Seat, spec: TrainSpec) -> Exception | None:
    """Why an engine cannot be built."""
    return error_of(lambda: seat.start(spec).close())


def lent_to_the_host(seat: Seat, case: Case) -> dict[str, Any]:
    """Empties the memory of a device, as on a GPU, between a pass and its step."""
    engine = seat.start(case.spec)
    try:
        inner: Any = engine
        inner = inner.engine
        rows = share(random_batch(NUM_ROWS, seed=1), seat.rank, seat.size)
        objective = PolicyObjective(entropy_coef=0.01)
        first = engine.forward_backward(rows, objective), engine.optim_step()
        engine.forward_backward(rows, objective)
        tensors = {part: inner._tensors_of(part) for part in ("weights", "optimizer", "gradients")}
        before, meanwhile = sum_of(tensors), 0
        # Memory that other processes map cannot be emptied: it is on the host anyway.
        movable = {part: [t for t in held if t.untyped_storage().resizable()] for part, held in tensors.items()}
        kept = sum_of(tensors) - sum_of(movable)
        for part, held in movable.items():
            inner.host_offload.offload(part, held)
        meanwhile = sum_of(tensors) - kept
        for part in movable:
            inner.host_offload.onload(part)
        return {"before": before, "meanwhile": meanwhile, "step": engine.optim_step(), "first": first}
    finally:
        engine.close()


def sum_of(tensors: dict[str, list[torch.Tensor]]) -> int:
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for held in tensors.values() for t in held}
    return sum(storage.nbytes() for storage in storages.values())


def error_of(action: Any) -> Exception | None:
    try:
        action()
    except Exception as error:
        return error
    return None
