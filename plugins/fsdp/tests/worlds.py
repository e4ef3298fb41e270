"""Runs cases in real worlds of gloo processes; each world starts once and runs all of its cases."""

from __future__ import annotations

import gc
import multiprocessing
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from rlsdk.algorithms import PolicyObjective
from rlsdk.interfaces import (
    AdapterSpec,
    Batch,
    Head,
    ModelSpec,
    Objective,
    ObjectiveResult,
    OptimSpec,
    RankContext,
    TrainEngine,
    TrainSpec,
)
from rlsdk.kit.ranks.rendezvous import hold_port, init_process_group
from rlsdk.kit.ranks.shared_memory import find_block
from rlsdk.testing.process.models import random_batch
from rlsdk.testing.process.worlds import start_context
from rlsdk_fsdp.config import FsdpOptions

NUM_ROWS = 11
WORLD_S = 540
"""Seconds in which the cases of a world must end: on cores that others share, too."""
# A large eps: Adam divides by the root of the squared gradient, and where that is 0 but for rounding, the sign of the
# step would be rounding's too.
OPTIM = OptimSpec(lr=1e-3, weight_decay=0.1, eps=1e-3, schedule="cosine", warmup_steps=2, total_steps=8)


@dataclass(frozen=True)
class SquaredError:
    """Of values or scores against the batch's advantages."""

    output: str

    @property
    def outputs(self) -> Sequence[str]:
        return (self.output,)

    def __call__(self, outputs: Mapping[str, torch.Tensor], batch: Batch) -> ObjectiveResult:
        wanted = batch["advantages"]
        if self.output == "scores":
            loss = ((outputs["scores"] - batch.row_sum(wanted)) ** 2).sum() / NUM_ROWS
        else:
            loss = ((outputs["values"] - wanted) ** 2 * batch["loss_weight"]).sum()
        return ObjectiveResult(loss=loss, maxima={"length": float(batch.lengths.max())})


@dataclass
class Broken:
    """Raises in its second micro-batch, with gradients of the first underway."""

    outputs: Sequence[str] = ("log_probs",)
    calls: int = 0

    def __call__(self, outputs: Mapping[str, torch.Tensor], batch: Batch) -> ObjectiveResult:
        self.calls += 1
        if self.calls == 2:
            raise ArithmeticError("no loss")
        return ObjectiveResult(loss=outputs["log_probs"].sum())


OBJECTIVES: Mapping[str, Objective] = {
    "log_probs": PolicyObjective(entropy_coef=0.01),
    "values": SquaredError("values"),
    "scores": SquaredError("scores"),
}


@dataclass(frozen=True)
class Case:
    """One engine, built and driven alike in every world."""

    name: str
    model: str
    options: FsdpOptions = field(default_factory=FsdpOptions)
    rows: int | None = None
    """`micro_batch_rows`; None: by tokens."""
    tokens: int = 10_000
    """`micro_batch_tokens`: all rows in one, unless said."""
    dtype: str = "float32"
    head: str = "lm"
    checkpointing: bool = False
    random: bool = False
    adapter: AdapterSpec | None = None
    calls: int = 1
    """`forward_backward` calls before the step."""
    lonely: bool = False
    """Rank 0 gets every row, the others none."""
    offloaded: bool = False
    """All memory is lent to the host and taken back before each step."""
    failed_before: bool = False
    """The first objective raises."""
    load: str | None = None
    first: bool = False
    """One step comes before the two that are compared."""
    save: str | None = None
    """Where, after that first step."""
    export: str | None = None
    probe: Callable[[Case, RankContext], object] | None = None
    """Called in place of `drive`."""

    @property
    def output(self) -> str:
        return {"lm": "log_probs", "value": "values", "score": "scores"}[self.head]

    def as_reference(self) -> Case:
        return replace(self, save=None, export=None, offloaded=False, failed_before=False)


def spec_of(case: Case) -> TrainSpec:
    return TrainSpec(
        model=ModelSpec(path=case.model, dtype=case.dtype, head=Head(case.head), adapter=case.adapter),
        optim=OPTIM,
        micro_batch_rows=case.rows,
        micro_batch_tokens=None if case.rows else case.tokens,
        activation_checkpointing=case.checkpointing,
        init_from_config=case.random,
        options=case.options,
    )


def share(batch: Batch, rank: int, world: int, *, lonely: bool = False) -> Batch:
    """Uneven shares: rank r takes rows r, r + world, ..., but rank 0 takes the last two."""
    if lonely:
        return batch.select(range(batch.num_rows) if rank == 0 else [])
    owner = [0 if at >= batch.num_rows - 2 else at % world for at in range(batch.num_rows)]
    return batch.select([at for at, who in enumerate(owner) if who == rank])


def drive(engine: TrainEngine, case: Case) -> dict[str, Any]:
    """Two optimizer steps, with passes without gradient before and after; all that engines can be compared in."""
    objective, place = OBJECTIVES[case.output], engine.parallel
    rank, world = place.dp_rank, place.dp_size
    found: dict[str, Any] = {"norms": [], "losses": [], "sums": [], "maxima": [], "lrs": [], "micro_batches": []}
    found["place"] = place
    if case.load:
        engine.load_checkpoint(Path(case.load))
    if case.failed_before:
        with suppress(ArithmeticError):
            engine.forward_backward(random_batch(NUM_ROWS, seed=1).select(range(rank, NUM_ROWS, world)), Broken())
    if case.first:
        engine.forward_backward(share(random_batch(NUM_ROWS, seed=9), rank, world), objective)
        engine.optim_step()
    if case.save:
        engine.save_checkpoint(Path(case.save))
    mine = share(random_batch(NUM_ROWS, seed=3), rank, world, lonely=case.lonely)
    found |= {"row_ids": mine["row_id"], "lengths": mine.lengths}
    found["before"] = engine.forward(mine, (case.output,))[case.output]
    for step in range(2):
        for call in range(case.calls):
            part = share(random_batch(NUM_ROWS, seed=10 + step * 10 + call), rank, world, lonely=case.lonely)
            result = engine.forward_backward(part, objective)
            found["losses"].append(result.loss)
            found["sums"].append(dict(result.sums))
            found["maxima"].append(dict(result.maxima))
            found["micro_batches"].append(result.num_micro_batches)
        if case.offloaded:
            found["offload_bytes"] = offload_and_onload(engine)
        # What a pass gathers right before a step must not be there after it.
        engine.forward(mine, (case.output,))
        report = engine.optim_step()
        found["norms"].append(report.grad_norm)
        found["lrs"].append(report.lr)
        found["after"] = engine.forward(mine, (case.output,))[case.output]
    if case.export:
        engine.save_pretrained(Path(case.export))
    found["shards"] = [(s.name, s.box, s.tensor.clone()) for s in engine.shards()]
    found["private"] = [s.name for s in engine.shards() if find_block(s.tensor) is None]
    found["layout"] = engine.layout()
    found["random"] = torch.rand(3)
    return found


def offload_and_onload(engine: Any) -> tuple[int, int]:
    """Lends every part to the host, as on a GPU; the device bytes behind them before and meanwhile."""
    tensors = {part: engine._tensors_of(part) for part in ("weights", "optimizer", "gradients")}
    flat = [tensor for part in tensors.values() for tensor in part]
    before = sum(tensor.untyped_storage().nbytes() for tensor in flat)
    for part, held in tensors.items():
        engine.host_offload.offload(part, held)
    meanwhile = sum(tensor.untyped_storage().nbytes() for tensor in flat)
    for part in tensors:
        engine.host_offload.onload(part)
    return before, meanwhile


def _rank_main(rank: int, world: int, ports: Any, cases: list[Case], folder: str) -> None:
    from rlsdk_fsdp.engine import FsdpTrainEngine

    torch.set_num_threads(1)
    if rank == 0:
        port = hold_port("127.0.0.1")
        for _ in range(world - 1):
            ports.put(port)
    else:
        port = ports.get(timeout=120)
    ctx = RankContext(
        role="actor", rank=rank, world_size=world, local_rank=rank, master_port=port, timeout_s=120.0, seed=5
    )
    # Another role of the same process: the group outlives the engines of single cases, as it does in a worker.
    init_process_group(replace(ctx, role="keeper"), "gloo")
    results: dict[str, Any] = {}
    for case in cases:
        engine = FsdpTrainEngine()
        try:
            if case.probe is not None:
                results[case.name] = case.probe(case, ctx)
                continue
            # What is lent to the host lies in memory that no other process reads, as on a GPU.
            with patch("rlsdk_fsdp.engine.keep_shared") if case.offloaded else nullcontext():
                engine.initialize(ctx, spec_of(case))
            results[case.name] = drive(engine, case)
        except Exception as error:
            results[case.name] = {"error": error, "trace": traceback.format_exc()}
        finally:
            engine.close()
        # Engines look for garbage as they close; all that was imported need not be looked through each time.
        gc.freeze()
    torch.save(results, Path(folder) / f"{world}-{rank}.pt")


def run_world(world: int, cases: list[Case], folder: Path) -> dict[str, list[Any]]:
    """Results of each case, rank by rank."""
    ports = multiprocessing.get_context("spawn").Queue()
    ranks = [
        start_context(rank, "rlsdk_fsdp.engine").Process(
            target=_rank_main, args=(rank, world, ports, cases, str(folder))
        )
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(WORLD_S)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert codes == [0] * world, f"ranks ended with {codes} (None: still running after {WORLD_S} s)"
    loaded = [torch.load(folder / f"{world}-{rank}.pt", weights_only=False) for rank in range(world)]
    return {case.name: [results[case.name] for results in loaded] for case in cases}
