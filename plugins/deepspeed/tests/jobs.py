"""What ranks do in these tests: picklable functions of a seat (`rlsdk.testing.process.worlds`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import torch

from rlsdk.algorithms.objectives.policy import PolicyObjective
from rlsdk.interfaces import (
    AdapterSpec,
    Batch,
    Head,
    ModelSpec,
    ObjectiveResult,
    OptimSpec,
    RankContext,
    TrainEngine,
    TrainSpec,
    WeightPart,
)
from rlsdk.kit.model.chunked_head import VocabularyHead
from rlsdk.kit.model.logit_chunks import MAX_LOGITS
from rlsdk.kit.ranks.rendezvous import destroy_process_group, init_process_group
from rlsdk.kit.ranks.shared_memory import find_block
from rlsdk.testing.process.models import random_batch
from rlsdk.testing.process.worlds import SEED, Seat
from rlsdk_deepspeed.config import DeepSpeedOptions

NUM_ROWS = 11
# A large eps: Adam divides by the root of the squared gradient, and where that is 0 but for rounding, the sign of the
# step would be rounding's too.
OPTIM = OptimSpec(lr=1e-3, weight_decay=0.1, eps=1e-3, schedule="cosine", warmup_steps=2, total_steps=8)

# Its first step is the gradient itself: Adam divides by `eps` plus a root that is nothing beside it.
GRADIENT = OptimSpec(lr=1e9, eps=1e9, weight_decay=0.0, max_grad_norm=None)


@dataclass(frozen=True)
class Case:
    """An engine, and what is done with it."""

    model: str
    options: DeepSpeedOptions = field(default_factory=DeepSpeedOptions)
    dtype: str = "float32"
    adapter: AdapterSpec | None = None
    checkpointing: bool = False
    calls: int = 1
    """`forward_backward` calls before each step."""
    lonely: bool = False
    """Rank 0 gets every row, the others none."""
    logits: int = 1 << 25
    """In memory at once."""
    split: bool = False
    """ZeRO 3 splits even weights as small as these, which it keeps whole unless told."""
    watched: bool = False
    """The entropy is asked for, but no part of the loss."""
    load: str | None = None
    """A checkpoint after two steps; the third step follows."""
    save: str | None = None
    """Where, after two steps."""
    export: str | None = None
    """Where, at the end."""

    @property
    def spec(self) -> TrainSpec:
        return TrainSpec(
            model=ModelSpec(path=self.model, dtype=self.dtype, head=Head.LM, adapter=self.adapter),
            optim=OPTIM,
            micro_batch_rows=3,
            activation_checkpointing=self.checkpointing,
            options=self.options,
            engine_kwargs={"stage3_param_persistence_threshold": 0} if self.split else {},
        )


class Watched(PolicyObjective):
    """Asks for an output that it does not use."""

    @property
    def outputs(self) -> Sequence[str]:
        return ("log_probs", "entropy")


def share(batch: Batch, rank: int, world: int, *, lonely: bool = False) -> Batch:
    """Uneven shares: rank r takes rows r, r + world, ..., but rank 0 takes the last two."""
    if lonely:
        return batch.select(range(batch.num_rows) if rank == 0 else [])
    owner = [0 if at >= batch.num_rows - 2 else at % world for at in range(batch.num_rows)]
    return batch.select([at for at, who in enumerate(owner) if who == rank])


def drive(engine: TrainEngine, case: Case) -> dict[str, Any]:
    """Three steps, the third of them alone if a checkpoint is loaded: what engines can be compared in."""
    place, objective = engine.parallel, Watched() if case.watched else PolicyObjective(entropy_coef=0.01)
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


@contextmanager
def logits_in_memory(limit: int) -> Iterator[Mock]:
    """Counts the chunks."""
    usual = MAX_LOGITS["cpu"]
    MAX_LOGITS["cpu"] = limit
    try:
        with patch.object(VocabularyHead, "logits", autospec=True, side_effect=VocabularyHead.logits) as calls:
            yield calls
    finally:
        MAX_LOGITS["cpu"] = usual


def train(seat: Seat, case: Case) -> dict[str, Any]:
    engine = seat.start(case.spec)
    try:
        with logits_in_memory(case.logits) as calls:
            return {**drive(engine, case), "chunks": calls.call_count}
    finally:
        engine.close()


def gradient(seat: Seat, case: Case) -> dict[str, Any]:
    """Of all rows, this rank's shards."""
    engine = seat.start(replace(case.spec, optim=GRADIENT))
    try:
        with logits_in_memory(case.logits):
            return step_of(engine)
    finally:
        engine.close()


def step_of(engine: TrainEngine) -> dict[str, Any]:
    """What a step subtracts from each shard."""
    before = [shard.tensor.clone() for shard in engine.shards()]
    place = engine.parallel
    rows = share(random_batch(NUM_ROWS, seed=4), place.dp_rank, place.dp_size)
    engine.forward_backward(rows, PolicyObjective(entropy_coef=0.01))
    engine.optim_step()
    shards = [(s.name, s.box, old - s.tensor) for s, old in zip(engine.shards(), before, strict=True)]
    return {"shards": shards, "layout": engine.layout()}


def outputs_of_a_frozen_model(seat: Seat, case: Case) -> list[torch.Tensor]:
    """Of the rows of this rank, three times."""
    engine = seat.start(replace(case.spec, optim=None))
    try:
        with logits_in_memory(case.logits):
            rows = share(random_batch(NUM_ROWS, seed=3), seat.rank, seat.size, lonely=case.lonely)
            return [engine.forward(rows, ("log_probs",))["log_probs"] for _ in range(3)]
    finally:
        engine.close()


def plain(case: Case) -> dict[str, Any]:
    """The same by one process of the built-in engine."""
    from rlsdk.reference.torch_engine import TorchTrainEngine

    engine = TorchTrainEngine()
    engine.initialize(RankContext(role="actor", seed=SEED), replace(case.spec, options=None, engine_kwargs={}))
    return drive(engine, replace(case, load=None, save=None, export=None, lonely=False))


def plain_gradient(case: Case) -> dict[str, Any]:
    """The same by one process of the built-in engine, all logits at once."""
    from rlsdk.reference.torch_engine import TorchTrainEngine

    engine = TorchTrainEngine()
    spec = replace(case.spec, options=None, engine_kwargs={}, optim=GRADIENT)
    engine.initialize(RankContext(role="actor", seed=SEED), spec)
    return step_of(engine)


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


@contextmanager
def kept_group(seat: Seat) -> Iterator[None]:
    """The process group outlives the engines that a job starts one after another, as it does in a worker."""
    ctx = RankContext(
        role="keeper",
        rank=seat.rank,
        world_size=seat.size,
        local_rank=seat.rank,
        master_port=seat.port,
        timeout_s=120.0,
    )
    init_process_group(ctx, "gloo")
    try:
        yield
    finally:
        destroy_process_group(ctx)


def adapter(seat: Seat, case: Case) -> dict[str, Any]:
    with kept_group(seat):
        return probe_adapter(seat, case)


def probe_adapter(seat: Seat, case: Case) -> dict[str, Any]:
    """The reference is asked first of all; then training, a kept reference, exports, and a checkpoint of it."""
    folder, spec = Path(case.export or ""), case.spec
    mine = share(random_batch(NUM_ROWS, seed=3), seat.rank, seat.size)

    def log_probs(engine: TrainEngine, method: str = "forward") -> torch.Tensor:
        found: torch.Tensor = getattr(engine, method)(mine, ("log_probs",))["log_probs"]
        return found

    def step(seed: int, loss: Any) -> float:
        engine.forward_backward(share(random_batch(NUM_ROWS, seed=seed), seat.rank, seat.size), loss)
        log_probs(engine, "forward_reference")  # it changes no gradient
        return engine.optim_step().grad_norm

    loss = PolicyObjective(entropy_coef=0.01)
    alone = seat.start(replace(spec, optim=None, model=replace(spec.model, adapter=None)))
    base = log_probs(alone)
    alone.close()
    engine = seat.start(spec)
    inner: Any = engine
    inner = inner.engine
    found: dict[str, Any] = {"first": torch.equal(log_probs(engine, "forward_reference"), base)}
    found["norms"] = [step(seed, loss) for seed in (10, 20)]
    found["off"] = torch.equal(log_probs(engine, "forward_reference"), base)
    found["moved"] = engine.moved_share()
    found["held"] = {part: bytes_of(inner._tensors_of(part)) for part in ("weights", "optimizer")}
    found["dtypes"] = {p.dtype for p in inner.adapter.adapter.parameters.values()}
    kept = log_probs(engine)
    engine.keep_reference()
    step(30, loss)
    found["kept"] = torch.equal(log_probs(engine, "forward_reference"), kept)
    before = [s.tensor.clone() for s in engine.shards()]
    found["skipped"] = step(40, NotFinite())
    found["stayed"] = all(torch.equal(s.tensor, old) for s, old in zip(engine.shards(), before, strict=True))
    for export in ("adapter", "merged"):
        object.__setattr__(inner.adapter.adapter.spec, "export", export)
        engine.save_pretrained(folder / f"exported_{export}")
    saved = folder / "saved"
    saved.mkdir(exist_ok=True)
    engine.save_checkpoint(saved)
    found["after"] = dict(zip(mine["row_id"].tolist(), log_probs(engine).split(mine.lengths.tolist()), strict=True))
    now = log_probs(engine)
    engine.close()
    resumed = seat.start(spec)
    resumed.load_checkpoint(saved)
    found["resumed"] = torch.equal(log_probs(resumed, "forward_reference"), kept)
    found["equal"] = torch.equal(log_probs(resumed), now)
    resumed.close()
    return found


def refused_checkpoints(seat: Seat, cases: dict[str, Case]) -> dict[str, Any]:
    """The error of each case that loads its checkpoint."""
    with kept_group(seat):
        return {name: load_damaged(seat, case, [str(case.load)])[str(case.load)] for name, case in cases.items()}


def parts(seat: Seat, case: Case) -> dict[WeightPart, dict[str, Any]]:
    """Both parts of the weights, and the reference of a frozen model's adapter, which is the model without it."""
    engine = seat.start(case.spec if case.calls else replace(case.spec, optim=None))
    try:
        return {
            part: {
                "layout": engine.part_layout(part),
                "shards": [(s.name, s.box, s.tensor.clone()) for s in engine.part_shards(part)],
                "private": [s.name for s in engine.part_shards(part) if find_block(s.tensor) is None],
            }
            for part in WeightPart
        }
    finally:
        engine.close()


@dataclass(frozen=True)
class NotFinite:
    """A loss that is NaN."""

    outputs: Sequence[str] = ("log_probs",)

    def __call__(self, outputs: Any, batch: Batch) -> ObjectiveResult:
        return ObjectiveResult(loss=outputs["log_probs"].sum() * math.nan)


def bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    """Of different memory."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def sum_of(tensors: dict[str, list[torch.Tensor]]) -> int:
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for held in tensors.values() for t in held}
    return sum(storage.nbytes() for storage in storages.values())


def error_of(action: Any) -> Exception | None:
    try:
        action()
    except Exception as error:
        return error
    return None
