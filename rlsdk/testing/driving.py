"""Driving a train engine through steps, and plain torch through the same: what the train suite compares."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlsdk.interfaces import (
    Batch,
    Box,
    ForwardBackwardResult,
    Head,
    ModelSpec,
    ObjectiveResult,
    OptimSpec,
    TrainEngine,
    TrainSpec,
    WeightLayout,
)
from rlsdk.kit.hf import canonical_parameters
from rlsdk.testing.models import random_batch
from rlsdk.testing.reference import plain_outputs
from rlsdk.testing.worlds import Seat

OPTIM = OptimSpec(lr=1e-2, weight_decay=0.1, eps=1e-3, max_grad_norm=None)
"""A large eps: Adam divides by the root of the squared gradient, and where that is 0 but for rounding, the sign of the
step would be rounding's too; and a step that ignores the gradient's size would hide one that is scaled wrongly."""


@dataclass(frozen=True)
class Weighed:
    """Adds up what it asks for, weighed with `loss_weight` and `advantages`; nothing is averaged."""

    outputs: Sequence[str] = ("log_probs",)

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> ObjectiveResult:
        weight, wanted = batch["loss_weight"], batch["advantages"]
        loss = weight.new_zeros(())
        if "log_probs" in outputs:
            loss = loss - (weight * wanted * outputs["log_probs"]).sum()
        if "entropy" in outputs:
            loss = loss - (weight * outputs["entropy"]).sum()
        if "values" in outputs:
            loss = loss + (weight * (outputs["values"] - wanted) ** 2).sum()
        if "scores" in outputs:
            loss = loss + ((outputs["scores"] - batch.row_sum(wanted)) ** 2 * batch["row_weight"]).sum()
        longest = float(batch.lengths.max()) if batch.num_rows else -math.inf
        sums: dict[str, Tensor | float] = {"rows": float(batch.num_rows), "weight": weight.sum()}
        return ObjectiveResult(loss=loss, sums=sums, maxima={"longest": longest})


@dataclass(frozen=True)
class NotFinite:
    """A loss that is not a number."""

    outputs: Sequence[str] = ("log_probs",)

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> ObjectiveResult:
        return ObjectiveResult(loss=outputs["log_probs"].sum() * math.nan)


def train_batch(num_rows: int = 9, *, seed: int = 0, longest: int = 20, masked: bool = False) -> Batch:
    """Rows with weights on every token. Masked: only some tokens are the policy's, and the weights of the others are
    left where they are: what an engine gives for those tokens is 0 and has no gradient."""
    batch = random_batch(num_rows, seed=seed, longest=longest)
    return _weighed(batch, seed, batch["response_mask"] if masked else None)


def rows_of(lengths: Sequence[int], *, seed: int = 0, masked: bool = False, temperature: float = 1.0) -> Batch:
    """As `train_batch`, of rows of these lengths. Their identities are large and in no order, as those of a share of a
    long run are; a mask has holes, begins at a first position, and leaves the last row out."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(128, (sum(lengths),), generator=generator)
    row_id = 1000 + 7 * torch.randperm(len(lengths), generator=generator)
    batch = Batch.from_rows([row.tolist() for row in torch.split(ids, list(lengths))], row_id=row_id)
    mask = torch.rand(batch.num_tokens, generator=generator) < 0.6
    mask[0] = True
    mask[batch.num_tokens - lengths[-1] :] = False
    found = _weighed(batch, seed, mask if masked else None)
    return found if temperature == 1.0 else found.with_meta(temperature=temperature)


def _weighed(batch: Batch, seed: int, mask: Tensor | None) -> Batch:
    """The batch's rows with what `Weighed` reads."""
    generator = torch.Generator().manual_seed(seed + 1)
    fields = {
        "input_ids": batch["input_ids"],
        "advantages": torch.randn(batch.num_tokens, generator=generator),
        "loss_weight": torch.full((batch.num_tokens,), 1.0 / batch.num_tokens),
    }
    rows = {"row_id": batch["row_id"], "row_weight": torch.full((batch.num_rows,), 1.0 / batch.num_rows)}
    tokens = fields if mask is None else {**fields, "response_mask": mask}
    return Batch(lengths=batch.lengths, tokens=tokens, rows=rows)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One engine and what it is driven through."""

    model: str
    steps: Sequence[Sequence[Batch]] = ()
    """For each optimizer step, the batches of its `forward_backward` calls."""
    head: Head = Head.LM
    objective: Any = field(default_factory=Weighed)
    optim: OptimSpec | None = OPTIM
    """None: a frozen model."""
    rows: int | None = None
    """`micro_batch_rows`; None: by tokens."""
    tokens: int = 100_000
    """`micro_batch_tokens`: all rows in one pass, unless said."""
    dtype: str = "float32"
    checkpointing: bool = False
    """`activation_checkpointing`."""
    random: bool = False
    """`init_from_config`."""
    options: object | None = None
    engine_kwargs: Mapping[str, object] = field(default_factory=dict)
    lonely: bool = False
    """The first data-parallel rank gets every row, the others none."""
    probe: tuple[Batch, tuple[str, ...]] | None = None
    """Outputs of this are taken after the last step."""
    load: str | None = None
    """Checkpoint that is loaded first."""
    save: str | None = None
    save_after: int = 0
    """Steps before the checkpoint is written."""
    export: str | None = None

    @property
    def spec(self) -> TrainSpec:
        return TrainSpec(
            model=ModelSpec(path=self.model, dtype=self.dtype, head=self.head),
            optim=self.optim,
            micro_batch_rows=self.rows,
            micro_batch_tokens=None if self.rows else self.tokens,
            activation_checkpointing=self.checkpointing,
            init_from_config=self.random,
            options=self.options,
            engine_kwargs=dict(self.engine_kwargs),
        )


@dataclass(kw_only=True)
class Driven:
    """What came of a case."""

    results: list[ForwardBackwardResult] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    lrs: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    row_ids: list[int] = field(default_factory=list)
    """Of the probe's rows on this rank."""
    lengths: list[int] = field(default_factory=list)
    shards: list[tuple[str, Box, Tensor]] = field(default_factory=list)
    layout: WeightLayout | None = None
    collects: bool = True
    seen: list[dict[str, Tensor]] = field(default_factory=list)
    """Outputs that were asked for on the way (`scripts.look`)."""
    faults: list[str] = field(default_factory=list)
    """What a script found wrong by itself."""


def drive(seat: Seat, case: Case) -> Driven:
    """Runs a case on one rank."""
    engine = seat.start(case.spec)
    try:
        return driven(engine, case)
    finally:
        engine.close()


def driven(engine: TrainEngine, case: Case) -> Driven:
    """The same, on an engine that is there."""
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
    look_at_the_end(engine, case, found)
    return found


def look_at_the_end(engine: TrainEngine, case: Case, found: Driven) -> None:
    """Takes down the probe's outputs and what the engine holds; writes the export."""
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
    """A batch is read: workers of one node share its memory."""
    before = {name: tensor.clone() for name, tensor in (*batch.tokens.items(), *batch.rows.items())}
    yield
    after = {**batch.tokens, **batch.rows}
    found.faults += [
        f"the batch's {name} was changed" for name, tensor in before.items() if not torch.equal(tensor, after[name])
    ]


def wrong_outputs(engine: TrainEngine, batch: Batch, names: Sequence[str], outputs: Mapping[str, Any]) -> list[str]:
    """What about the form of outputs is not as `OUTPUTS` says."""
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
    """Fields of a result that are not of the type that the interface says: tensors hold memory, and do not travel."""
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
    """The rows of this data-parallel rank, uneven on purpose: the first takes the last two as well."""
    rank, size = engine.parallel.dp_rank, engine.parallel.dp_size
    if lonely:
        return batch.select(range(batch.num_rows) if rank == 0 else [])
    owner = [0 if at >= batch.num_rows - 2 else at % size for at in range(batch.num_rows)]
    return batch.select([at for at, who in enumerate(owner) if who == rank])


def whole(ranks: Sequence[Driven]) -> dict[str, Tensor]:
    """Every tensor, put together from the ranks' shards; elements that nobody has are not a number."""
    shapes = {meta.name: meta.shape for rank in ranks if rank.layout for meta in rank.layout.tensors}
    out = {name: torch.full(shape, math.nan) for name, shape in shapes.items()}
    for rank in ranks:
        for name, box, tensor in rank.shards:
            out[name][box.slices(Box.whole(shapes[name]))] = tensor.float()
    return out


def by_row(ranks: Sequence[Driven], name: str) -> dict[int, Tensor]:
    """An output of every row, by the row's identity, from the ranks that collect."""
    found: dict[int, Tensor] = {}
    for rank in ranks:
        if rank.collects and rank.row_ids:
            values = rank.outputs[name]
            parts = torch.split(values, 1 if name == "scores" else rank.lengths)
            found |= dict(zip(rank.row_ids, parts, strict=True))
    return found


def plain_model_of(case: Case) -> Any:
    """transformers alone, with the head of the case; the caller's own."""
    return copy.deepcopy(_plain_model(case.model, causal=case.head is Head.LM))


@functools.lru_cache(maxsize=12)
def _plain_model(path: str, *, causal: bool) -> Any:
    """As it was read: requirements ask for the same few, many times, and reading takes longer than their steps."""
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    kind: Any = AutoModelForCausalLM if causal else AutoModelForTokenClassification
    return kind.from_pretrained(path, dtype=torch.float32).eval()


def plain_numbers(model: Any, head: Head, batch: Batch) -> dict[str, Tensor]:
    """Every output that the head gives, row by row without padding; differentiable. 0 off a mask where there is one."""
    if head is Head.LM:
        found = plain_outputs(model, batch)
        mask = batch.tokens.get("response_mask")
        return {n: values if mask is None else values * mask for n, values in found.items()}
    values, scores = [], []
    for ids in torch.split(batch["input_ids"], batch.lengths.tolist()):
        number = model(ids[None]).logits[0, :, 0].float()
        values += [number.new_zeros(1), number[:-1]]
        scores.append(number[-1:])
    return {"values": torch.cat(values), "scores": torch.cat(scores)}


def drive_plain(case: Case, model: Any = None) -> Driven:
    """What plain torch makes of a case: one pass over each batch, AdamW as torch has it, the schedule as it is said.

    Args:
        case: the steps.
        model: begins with these weights, and is trained; None: the case's own.
    """
    model = plain_model_of(case) if model is None else model
    parameters = canonical_parameters(model)[0]
    decayed = [p for p in parameters.values() if p.dim() >= 2]
    others = [p for p in parameters.values() if p.dim() < 2]
    optim = case.optim
    assert optim is not None
    groups = [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, foreach=False, fused=False)
    found = Driven()
    for at, batches in enumerate(case.steps):
        for batch in batches:
            if batch.num_rows == 0:
                found.results.append(ForwardBackwardResult(loss=0.0))
                continue
            numbers = plain_numbers(model, case.head, batch)
            result = case.objective({name: numbers[name] for name in case.objective.outputs}, batch)
            result.loss.backward()
            found.results.append(
                ForwardBackwardResult(
                    loss=float(result.loss.detach()),
                    sums={name: _number(value) for name, value in result.sums.items()},
                    maxima={name: _number(value) for name, value in result.maxima.items()},
                )
            )
        gradients = [p.grad for p in parameters.values() if p.grad is not None]
        norm = float(torch.linalg.vector_norm(torch.cat([g.double().flatten() for g in gradients])))
        if optim.max_grad_norm is not None and norm > optim.max_grad_norm:
            for gradient in gradients:
                gradient.mul_(optim.max_grad_norm / norm)
        found.norms.append(norm)
        found.lrs.append(scheduled(at, optim))
        found.skipped.append(False)
        for group in optimizer.param_groups:
            group["lr"] = found.lrs[-1]
        optimizer.step()
        optimizer.zero_grad()
    if case.probe is not None:
        batch, names = case.probe
        with torch.no_grad():
            numbers = plain_numbers(model, case.head, batch)
        found.outputs = {name: numbers[name] for name in names}
        found.row_ids, found.lengths = batch["row_id"].tolist(), batch.lengths.tolist()
    found.shards = [(name, Box.whole(tuple(p.shape)), p.detach()) for name, p in parameters.items()]
    return found


def _number(value: Tensor | float) -> float:
    return float(value.detach()) if isinstance(value, Tensor) else float(value)


def scheduled(step: int, optim: OptimSpec) -> float:
    """Learning rate of a step, from the words of `OptimSpec`."""
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    if optim.schedule == "constant" or optim.total_steps is None:
        return optim.lr
    done = min((step - optim.warmup_steps) / (optim.total_steps - optim.warmup_steps), 1.0)
    left = {"linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[optim.schedule]
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * left)
