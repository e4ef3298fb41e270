"""Cases for train engines: batches, an objective and settings; and the results of running them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rlsdk.interfaces import (
    AdapterSpec,
    Batch,
    Box,
    ForwardBackwardResult,
    Head,
    ModelSpec,
    ObjectiveResult,
    OptimSpec,
    TrainSpec,
    WeightLayout,
    WeightPart,
)
from rlsdk.testing.process.models import random_batch

OPTIM = OptimSpec(lr=1e-2, weight_decay=0.1, eps=1e-3, max_grad_norm=None)
"""A large eps. Adam divides by the root of the squared gradient: where this is 0 except for rounding, rounding would
determine the sign of the step. And a step that ignores the gradient's size would hide a wrongly scaled gradient."""
SETTINGS = {
    "short memory": replace(OPTIM, betas=(0.5, 0.7)),
    "long memory": replace(OPTIM, betas=(0.95, 0.9999), lr=3e-2),
    "no memory": replace(OPTIM, betas=(0.0, 0.9)),
    "large eps": replace(OPTIM, eps=0.3, lr=0.2),
    "no decay": replace(OPTIM, weight_decay=0.0),
    "strong decay": replace(OPTIM, weight_decay=5.0),
    "all at once": OptimSpec(
        lr=2e-2, betas=(0.7, 0.8), eps=1e-2, weight_decay=1.0, max_grad_norm=0.05, schedule="cosine", warmup_steps=1,
        total_steps=4, min_lr_ratio=0.3,
    ),
}  # fmt: skip
EVERYTHING = SETTINGS["all at once"]
"""Every field is another than by default."""

PLAIN_TEACHER = "plain_teacher_logits"
"""Field `[N, V]` of a batch that plain torch reads in place of a teacher: its logits, divided by its temperature."""


@dataclass(frozen=True)
class Weighted:
    """Sums the requested outputs, weighted by `loss_weight` and `advantages`; nothing is averaged."""

    outputs: Sequence[str] = ("log_probs",)

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> ObjectiveResult:
        weight, wanted = batch["loss_weight"], batch["advantages"]
        loss = weight.new_zeros(())
        if "log_probs" in outputs:
            loss = loss - (weight * wanted * outputs["log_probs"]).sum()
        if "entropy" in outputs:
            loss = loss - (weight * outputs["entropy"]).sum()
        if "divergence" in outputs:
            loss = loss + (weight * (1.0 + wanted) * outputs["divergence"]).sum()
        if "values" in outputs:
            loss = loss + (weight * (outputs["values"] - wanted) ** 2).sum()
        if "scores" in outputs:
            loss = loss + ((outputs["scores"] - batch.row_sum(wanted)) ** 2 * batch["row_weight"]).sum()
        longest = float(batch.lengths.max()) if batch.num_rows else -math.inf
        sums: dict[str, Tensor | float] = {"rows": float(batch.num_rows), "weight": weight.sum()}
        return ObjectiveResult(loss=loss, sums=sums, maxima={"longest": longest})


@dataclass(frozen=True)
class NotFinite:
    """A loss that is NaN."""

    outputs: Sequence[str] = ("log_probs",)

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> ObjectiveResult:
        return ObjectiveResult(loss=outputs["log_probs"].sum() * math.nan)


def train_batch(num_rows: int = 9, *, seed: int = 0, longest: int = 20, masked: bool = False) -> Batch:
    """Rows with weights on every token. Masked: only some tokens are the policy's. The weights of other tokens are not
    cleared: an engine must return 0 for these tokens, without gradient."""
    batch = random_batch(num_rows, seed=seed, longest=longest)
    return _weighted(batch, seed, batch["response_mask"] if masked else None)


def rows_of(lengths: Sequence[int], *, seed: int = 0, masked: bool = False, temperature: float = 1.0) -> Batch:
    """As `train_batch`, with rows of these lengths. Row identities are large and unordered, as in a share of a long
    run. A mask has holes, begins at a first position, and excludes the last row."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(128, (sum(lengths),), generator=generator)
    row_id = 1000 + 7 * torch.randperm(len(lengths), generator=generator)
    batch = Batch.from_rows([row.tolist() for row in torch.split(ids, list(lengths))], row_id=row_id)
    mask = torch.rand(batch.num_tokens, generator=generator) < 0.6
    mask[0] = True
    mask[batch.num_tokens - lengths[-1] :] = False
    found = _weighted(batch, seed, mask if masked else None)
    return found if temperature == 1.0 else found.with_meta(temperature=temperature)


def _weighted(batch: Batch, seed: int, mask: Tensor | None) -> Batch:
    """The batch's rows with the fields that `Weighted` reads."""
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
    """One engine and the calls to make on it."""

    model: str
    steps: Sequence[Sequence[Batch]] = ()
    """Batches of the `forward_backward` calls, by optimizer step."""
    head: Head = Head.LM
    objective: Any = field(default_factory=Weighted)
    optim: OptimSpec | None = OPTIM
    """None: a frozen model."""
    teacher: str | None = None
    """Model whose head is loaded for the output `divergence`."""
    rows: int | None = None
    """`micro_batch_rows`; None: limited by tokens."""
    tokens: int = 100_000
    """`micro_batch_tokens`; by default all rows run in one pass."""
    dtype: str = "float32"
    checkpointing: bool = False
    """`activation_checkpointing`."""
    random: bool = False
    """`init_from_config`."""
    adapter: AdapterSpec | None = None
    options: object | None = None
    engine_kwargs: Mapping[str, object] = field(default_factory=dict)
    lonely: bool = False
    """The first data-parallel rank gets every row, the others none."""
    probe: tuple[Batch, tuple[str, ...]] | None = None
    """The outputs of this batch are recorded after the last step."""
    load: str | None = None
    """Checkpoint that is loaded before the first step."""
    save: str | None = None
    save_after: int = 0
    """Number of steps before the checkpoint is written."""
    export: str | None = None
    tolerance: float = 1e-4
    """Largest difference from plain torch, which runs the same steps (`train_comparison`)."""
    witness: bool = True
    """False: plain torch does not run, because the engine's resources are counted."""

    @property
    def spec(self) -> TrainSpec:
        return TrainSpec(
            model=ModelSpec(path=self.model, dtype=self.dtype, head=self.head, adapter=self.adapter),
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
    """Results of a case."""

    results: list[ForwardBackwardResult] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    lrs: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    rates_of_skips: list[float] = field(default_factory=list)
    """Rates of skipped steps, which do not count as steps (`call_sequences.skip`)."""
    outputs: dict[str, Tensor] = field(default_factory=dict)
    row_ids: list[int] = field(default_factory=list)
    """Outputs of the probe's rows on this rank."""
    lengths: list[int] = field(default_factory=list)
    shards: list[tuple[str, Box, Tensor]] = field(default_factory=list)
    layout: WeightLayout | None = None
    collects: bool = True
    seen: list[dict[str, Tensor]] = field(default_factory=list)
    """Outputs that were requested between steps (`call_sequences.look`)."""
    seen_rows: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """For each of `seen`: identities and lengths of this rank's rows."""
    exported: list[tuple[str, list[tuple[str, Box, Tensor]]]] = field(default_factory=list)
    """Folders that several ranks exported to, and what this rank held then."""
    parts: dict[WeightPart, tuple[WeightLayout, list[tuple[str, Box, Tensor]]]] = field(default_factory=dict)
    """Layout and shards of the parts of a model with an adapter, as of the last time they were asked for."""
    faults: list[str] = field(default_factory=list)
    """Faults that a script found itself."""
    apart: list[str] = field(default_factory=list)
    """Results that differ from plain torch's; reported after the requirement's own checks."""
