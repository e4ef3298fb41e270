"""Runs cases in real worlds of gloo processes; each world starts once and runs all of its cases."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
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
    WeightPart,
)
from rlsdk.kit.ranks.rendezvous import hold_port, init_process_group
from rlsdk.kit.ranks.shared_memory import find_block
from rlsdk.testing.process.models import random_batch
from rlsdk.testing.process.worlds import start_context
from rlsdk_megatron.config import MegatronOptions

NUM_ROWS = 11
WORLD_S = 540
"""Seconds in which the cases of a world must end: on cores that others share, too."""
NUM_STEPS = 3
# A large eps: Adam divides by the root of the squared gradient, and where that is 0 but for rounding, the sign of the
# step would be rounding's too. The norm is near 4, so the limit clips.
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
    options: MegatronOptions = field(default_factory=MegatronOptions)
    rows: int | None = None
    """`micro_batch_rows`; None: by tokens."""
    tokens: int = 10_000
    """`micro_batch_tokens`: all rows in one, unless said."""
    dtype: str = "float32"
    head: str = "lm"
    random: bool = False
    checkpointing: bool = False
    adapter: AdapterSpec | None = None
    calls: int = 1
    """`forward_backward` calls before each step."""
    lonely: bool = False
    """Data-parallel rank 0 gets every row, the others none."""
    offloaded: bool = False
    """All memory is lent to the host and taken back before each step."""
    load: str | None = None
    first: bool = False
    """One step comes before those that are compared."""
    save: str | None = None
    """Where, after that first step."""
    export: str | None = None
    probe: Callable[[Case, RankContext], object] | None = None
    """Called in place of `drive`."""

    @property
    def output(self) -> str:
        return {"lm": "log_probs", "value": "values", "score": "scores"}[self.head]

    def as_reference(self) -> Case:
        """What one process has to do for the same numbers: nothing of how the work is split remains."""
        return Case(
            "reference",
            self.model,
            dtype=self.dtype,
            head=self.head,
            random=self.random,
            adapter=self.adapter,
            calls=self.calls,
            first=self.first or self.load is not None,
        )


def spec_of(case: Case, options: object | None = None) -> TrainSpec:
    return TrainSpec(
        model=ModelSpec(path=case.model, dtype=case.dtype, head=Head(case.head), adapter=case.adapter),
        optim=OPTIM,
        micro_batch_rows=case.rows,
        micro_batch_tokens=None if case.rows else case.tokens,
        activation_checkpointing=case.checkpointing,
        init_from_config=case.random,
        options=options,
    )


def share(batch: Batch, rank: int, world: int, *, lonely: bool = False) -> Batch:
    """Uneven shares: rank r takes rows r, r + world, ..., but rank 0 takes the last two."""
    if lonely:
        return batch.select(range(batch.num_rows) if rank == 0 else [])
    owner = [0 if at >= batch.num_rows - 2 else at % world for at in range(batch.num_rows)]
    return batch.select([at for at, who in enumerate(owner) if who == rank])


def drive(engine: TrainEngine, case: Case) -> dict[str, Any]:
    """Optimizer steps, with passes without gradient before and after; all that engines can be compared in."""
    objective, place = OBJECTIVES[case.output], engine.parallel
    found: dict[str, Any] = {"norms": [], "losses": [], "sums": [], "maxima": [], "lrs": [], "micro_batches": []}

    def rows(seed: int) -> Batch:
        return share(random_batch(NUM_ROWS, seed=seed), place.dp_rank, place.dp_size, lonely=case.lonely)

    if case.load:
        engine.load_checkpoint(Path(case.load))
    elif case.first:
        engine.forward_backward(rows(9), objective)
        engine.optim_step()
    if case.save:
        engine.save_checkpoint(Path(case.save))
    mine = rows(3)
    names = ("log_probs", "entropy") if case.head == "lm" else (case.output,)
    found |= {"row_ids": mine["row_id"], "lengths": mine.lengths, "collector": place.is_collector}
    found["before"] = engine.forward(mine, names)
    for step in range(NUM_STEPS):
        for call in range(case.calls):
            result = engine.forward_backward(rows(10 + step * 10 + call), objective)
            found["losses"].append(result.loss)
            found["sums"].append(dict(result.sums))
            found["maxima"].append(dict(result.maxima))
            found["micro_batches"].append(result.num_micro_batches)
        if case.offloaded:
            found["offload_bytes"] = offload_and_onload(engine)
        report = engine.optim_step()
        found["norms"].append(report.grad_norm)
        found["lrs"].append(report.lr)
    found["after"] = engine.forward(mine, names)
    if case.export:
        engine.save_pretrained(Path(case.export))
    found["lent"] = all(find_block(shard.tensor) is not None for shard in engine.shards())
    found["shards"] = [(s.name, s.box, s.tensor.clone()) for s in engine.shards()]
    found["layout"] = engine.layout()
    if case.adapter is not None:
        low = list(engine.part_shards(WeightPart.ADAPTER))
        found["low"] = {
            "shards": [(s.name, s.box, s.tensor.detach().clone()) for s in low],
            "layout": engine.part_layout(WeightPart.ADAPTER),
        }
        found["lent low"] = all(find_block(shard.tensor) is not None for shard in low)
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
    from rlsdk_megatron import groups
    from rlsdk_megatron.cpu_shim import device_scope
    from rlsdk_megatron.engine import MegatronTrainEngine

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
    # Another role of the same process: groups outlive the engines of single cases, as they do in a worker.
    keeper = replace(ctx, role="keeper")
    init_process_group(keeper, "gloo")
    kept: groups.Sizes | None = None
    results: dict[str, Any] = {}
    for case in cases:
        if groups.sizes_of(case.options) != kept:
            groups.leave(keeper)
            with device_scope(torch.device("cpu")):
                groups.join(keeper, case.options)
            kept = groups.sizes_of(case.options)
        engine = MegatronTrainEngine()
        try:
            if case.probe is not None:
                results[case.name] = case.probe(case, ctx)
                continue
            # Memory that is shared cannot be given back; a GPU's is not.
            with patch("rlsdk_megatron.building.keep_shared") if case.offloaded else nullcontext():
                engine.initialize(ctx, spec_of(case, case.options))
            results[case.name] = drive(engine, case)
        except Exception as error:
            results[case.name] = {"error": error, "trace": traceback.format_exc()}
        finally:
            engine.close()
    torch.save(results, Path(folder) / f"{world}-{rank}.pt")


def run_world(world: int, cases: list[Case], folder: Path) -> dict[str, list[Any]]:
    """Results of each case, rank by rank."""
    ports = multiprocessing.get_context("spawn").Queue()
    ranks = [
        start_context(rank, "rlsdk_megatron.engine").Process(
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
