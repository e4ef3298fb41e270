"""Runs the steps of a case on a train engine, and joins the results of its ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlsdk.interfaces import (
    Batch,
    Box,
    ModelSpec,
    TrainEngine,
)
from rlsdk.testing.process.worlds import Seat
from rlsdk.testing.train.cases import Case, Driven
from rlsdk.testing.train.comparison import compared


def drive(seat: Seat, case: Case) -> Driven:
    """Runs a case on one rank."""
    engine, different = seat.start(case.spec), list[str]()
    try:
        if case.teacher is not None:
            engine.load_teacher(ModelSpec(path=case.teacher, dtype=case.dtype))
        found = driven(compared(engine, case, different), case)
        found.apart += different
        return found
    finally:
        engine.close()


def driven(engine: TrainEngine, case: Case) -> Driven:
    """Runs a case on an existing engine."""
    found = Driven(collects=engine.parallel.is_collector)
    if case.load is not None:
        engine.load_checkpoint(Path(case.load))
    for at, batches in enumerate(case.steps):
        if case.save is not None and at == case.save_after:
            engine.save_checkpoint(Path(case.save))
        for batch in batches:
            mine = share(engine, batch, lonely=case.lonely)
            with unchanged(mine, found):
                found.results.append(engine.forward_backward(mine, case.objective))
            found.faults += wrong_types(found.results[-1])
        step = engine.optim_step()
        found.faults += wrong_types(step)
        found.norms.append(step.grad_norm)
        found.lrs.append(step.lr)
        found.skipped.append(step.skipped)
    record_final_state(engine, case, found)
    return found


def record_final_state(engine: TrainEngine, case: Case, found: Driven) -> None:
    """Records the probe's outputs and the engine's weights; writes the export."""
    if case.probe is not None:
        mine = share(engine, case.probe[0], lonely=case.lonely)
        with unchanged(mine, found):
            found.outputs = engine.forward(mine, case.probe[1])
        found.faults += wrong_outputs(engine, mine, case.probe[1], found.outputs)
        found.row_ids, found.lengths = mine["row_id"].tolist(), mine.lengths.tolist()
    if case.export is not None:
        engine.save_pretrained(Path(case.export))
    found.layout = engine.layout()
    found.shards = [(shard.name, shard.box, shard.tensor.detach().cpu().clone()) for shard in engine.shards()]


@contextmanager
def unchanged(batch: Batch, found: Driven) -> Iterator[None]:
    """Checks that a batch is only read: workers of one node share its memory."""
    before = {name: tensor.clone() for name, tensor in (*batch.tokens.items(), *batch.rows.items())}
    yield
    after = {**batch.tokens, **batch.rows}
    found.faults += [
        f"the batch's {name} was changed" for name, tensor in before.items() if not torch.equal(tensor, after[name])
    ]


def wrong_outputs(engine: TrainEngine, batch: Batch, names: Sequence[str], outputs: Mapping[str, Any]) -> list[str]:
    """Differences of the outputs' form from `OUTPUTS`."""
    if not engine.parallel.is_collector:
        return []
    faults = [f"outputs {sorted(outputs)}, asked for {sorted(names)}"] if outputs.keys() != set(names) else []
    for name, values in outputs.items():
        shape = (batch.num_rows if name == "scores" else batch.num_tokens,)
        form = (tuple(values.shape), str(values.dtype), values.device.type, values.requires_grad)
        if form != (shape, "torch.float32", "cpu", False):
            faults.append(f"{name} is {form}, expected {shape} float32 on the CPU, without gradient")
        if not bool(values.isfinite().all()):
            faults.append(f"{name} is not finite")
    return faults


def wrong_types(result: Any) -> list[str]:
    """Fields of a result whose type is not the interface's: tensors would keep memory, and are not for sending."""
    kinds = {"float": float, "int": int, "bool": bool}
    faults = [
        f"{type(result).__name__}.{one.name} is a {type(getattr(result, one.name)).__name__}, expected {one.type}"
        for one in fields(result)
        if str(one.type) in kinds and not isinstance(getattr(result, one.name), kinds[str(one.type)])
    ]
    for name in ("sums", "maxima"):
        for key, value in getattr(result, name, {}).items():
            faults += (
                [] if isinstance(value, float) else [f"{name} {key!r} is a {type(value).__name__}, expected float"]
            )
    return faults


def share(engine: TrainEngine, batch: Batch, *, lonely: bool = False) -> Batch:
    """The rows of this data-parallel rank, uneven on purpose: the first rank also gets the last two rows."""
    rank, size = engine.parallel.dp_rank, engine.parallel.dp_size
    if lonely:
        return batch.select(range(batch.num_rows) if rank == 0 else [])
    owner = [0 if at >= batch.num_rows - 2 else at % size for at in range(batch.num_rows)]
    return batch.select([at for at, who in enumerate(owner) if who == rank])


def whole(ranks: Sequence[Driven]) -> dict[str, Tensor]:
    """Every tensor, assembled from the ranks' shards; elements that no rank has are NaN."""
    shapes = {meta.name: meta.shape for rank in ranks if rank.layout for meta in rank.layout.tensors}
    out = {name: torch.full(shape, math.nan) for name, shape in shapes.items()}
    for rank in ranks:
        for name, box, tensor in rank.shards:
            out[name][box.slices(Box.whole(shapes[name]))] = tensor.float()
    return out


def by_row(ranks: Sequence[Driven], name: str) -> dict[int, Tensor]:
    """One output of every row, by the row's identity, from the ranks that collect outputs."""
    found: dict[int, Tensor] = {}
    for rank in ranks:
        if rank.collects and rank.row_ids:
            values = rank.outputs[name]
            parts = torch.split(values, 1 if name == "scores" else rank.lengths)
            found |= dict(zip(rank.row_ids, parts, strict=True))
    return found
