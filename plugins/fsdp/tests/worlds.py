"""Runs cases in real worlds of gloo processes; each world starts once and runs all of its cases."""

from __future__ import annotations

import multiprocessing
import socket
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlsdk.algorithms import PolicyObjective
from rlsdk.interfaces import (
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
from rlsdk.testing.models import random_batch
from rlsdk_fsdp.config import FsdpOptions

# A large eps: Adam divides by the root of the squared gradient, and where that is 0 but for rounding, the sign of the
# step would be rounding's too.
OPTIM = OptimSpec(lr=1e-3, weight_decay=0.1, eps=1e-3)


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
            loss = ((outputs["scores"] - batch.row_sum(wanted)) ** 2).sum() / 11
        else:
            loss = ((outputs["values"] - wanted) ** 2 * batch["loss_weight"]).sum()
        return ObjectiveResult(loss=loss)


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
    replicate: int = 1
    rows: int | None = None
    """`micro_batch_rows`; None: by tokens, all in one."""
    dtype: str = "float32"
    checkpointing: bool = False
    offload: bool = False
    calls: int = 1
    """`forward_backward` calls before the step."""
    lonely: bool = False
    """Rank 0 gets every row, the others none."""
    random: bool = False
    load: str | None = None
    save: str | None = None
    export: str | None = None
    head: str = "lm"

    @property
    def output(self) -> str:
        return {"lm": "log_probs", "value": "values", "score": "scores"}[self.head]


def spec_of(case: Case) -> TrainSpec:
    return TrainSpec(
        model=ModelSpec(path=case.model, dtype=case.dtype, head=Head(case.head)),
        optim=OPTIM,
        micro_batch_rows=case.rows,
        micro_batch_tokens=None if case.rows else 10_000,
        activation_checkpointing=case.checkpointing,
        init_from_config=case.random,
        options=FsdpOptions(replicate_size=case.replicate, cpu_offload=case.offload),
    )


def share(batch: Batch, rank: int, world: int, *, lonely: bool) -> Batch:
    """Uneven shares: rank r takes rows r, r + world, ... and rank 0 also those of the last rank."""
    if lonely:
        return batch.select(range(batch.num_rows) if rank == 0 else [])
    owner = [0 if at % world == world - 1 and at > world else at % world for at in range(batch.num_rows)]
    return batch.select([at for at, who in enumerate(owner) if who == rank])


def drive(engine: TrainEngine, case: Case, rank: int, world: int) -> dict[str, Any]:
    """Two optimizer steps; everything that another engine can be held against."""
    if case.load:
        engine.load_checkpoint(Path(case.load))
    found: dict[str, Any] = {"norms": [], "losses": [], "sums": []}
    mine = share(random_batch(11, seed=3), rank, world, lonely=case.lonely)
    found["row_ids"] = mine["row_id"]
    found["lengths"] = mine.lengths
    found["outputs"] = engine.forward(mine, (case.output,))[case.output]
    for step in range(2):
        for call in range(case.calls):
            part = share(random_batch(11, seed=10 + step * 10 + call), rank, world, lonely=case.lonely)
            result = engine.forward_backward(part, OBJECTIVES[case.output])
            found["losses"].append(result.loss)
            found["sums"].append(dict(result.sums))
        found["norms"].append(engine.optim_step().grad_norm)
        if step == 0 and case.save:
            engine.save_checkpoint(Path(case.save))
    if case.export:
        engine.save_pretrained(Path(case.export))
    found["shards"] = [(s.name, s.box, s.tensor.clone()) for s in engine.shards()]
    found["layout"] = engine.layout()
    return found


def _rank_main(rank: int, world: int, port: int, cases: list[Case], folder: str) -> None:
    from rlsdk.kit.rendezvous import init_process_group
    from rlsdk_fsdp.engine import FsdpTrainEngine

    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    base = {"rank": rank, "world_size": world, "local_rank": rank, "master_port": port, "timeout_s": 120.0}
    init_process_group(RankContext(role="keeper", **base), "gloo")
    for case in cases:
        engine = FsdpTrainEngine()
        try:
            engine.initialize(RankContext(role="actor", **base), spec_of(case))
            results[case.name] = drive(engine, case, rank, world)
        except Exception as error:
            results[case.name] = {"error": error, "trace": traceback.format_exc()}
        engine.close()
    torch.save(results, Path(folder) / f"{world}-{rank}.pt")


def run_world(world: int, cases: list[Case], folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Results of each case, rank by rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_rank_main, args=(r, world, port, cases, str(folder))) for r in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(240)
    codes = [process.exitcode for process in ranks]
    assert codes == [0] * world, codes
    loaded = [torch.load(folder / f"{world}-{rank}.pt", weights_only=False) for rank in range(world)]
    return {case.name: [results[case.name] for results in loaded] for case in cases}
