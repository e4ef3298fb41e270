"""Further objectives for requirements, besides `cases.Weighted`: they test requested outputs, inputs, reported metrics
and raised errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlsdk.interfaces import Batch, ObjectiveResult
from rlsdk.testing.process.modes import torch_modes

UNUSUAL = {("autocast", True), ("inference mode", True), ("gradients", False), ("default dtype", torch.bfloat16)}
"""Modes in which an objective computes something else than its author wrote."""
PAIR = torch.tensor([[0, 1, 2], [3, 4, 5]])
"""Added to the numbers of rows and of positions in fields of three dimensions."""


class RaisedHereError(RuntimeError):
    """Raised by `Raising`."""


class FullError(torch.OutOfMemoryError):
    """The error that torch raises when a device is out of memory."""

    def __init__(self, message: str) -> None:
        super().__init__(f"out of memory: {message}")


@dataclass(frozen=True)
class Raising:
    """Raises at a micro-batch with one of these rows; until then it trains."""

    rows: Sequence[int]
    outputs: Sequence[str] = ("log_probs",)
    error: type[Exception] = RaisedHereError
    arguments: tuple[object, ...] = ()
    """Of the error, behind its message."""

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> ObjectiveResult:
        if set(batch["row_id"].tolist()) & set(self.rows):
            raise self.error(f"a row of {sorted(self.rows)}", *self.arguments)
        return ObjectiveResult(loss=outputs[self.outputs[0]].sum())


@dataclass(frozen=True)
class FullOnce(Raising):
    """Out of memory the first time it gets one of these rows, then not again: an engine might silently retry."""

    error: type[Exception] = FullError
    met: list[bool] = field(default_factory=list)

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> ObjectiveResult:
        if not self.met and set(batch["row_id"].tolist()) & set(self.rows):
            self.met.append(True)
            return super().__call__(outputs, batch)
        return ObjectiveResult(loss=outputs["log_probs"].sum())


@dataclass(frozen=True)
class Unfit:
    """A finite loss whose gradient is infinite or NaN, because of one row."""

    row: int
    value: float = math.inf
    outputs: Sequence[str] = ("log_probs",)

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> ObjectiveResult:
        (name, *_), here = self.outputs, (batch["row_id"] == self.row).to(torch.float32)
        weight = batch["row_weight" if name == "scores" else "loss_weight"]
        here = here if name == "scores" else here[batch.row_of_token]
        # The loss does not change, but its gradient at this row's tokens is `value`.
        spoilt = _Slope.apply(outputs[name] * here, self.value) if here.any() else 0.0  # type: ignore[no-untyped-call]
        return ObjectiveResult(loss=(weight * outputs[name]).sum() + spoilt)


@dataclass(frozen=True)
class LossAlone:
    """A loss that is not finite, with the gradient of `Weighted`: the added value depends on no weight."""

    value: float = math.nan
    outputs: Sequence[str] = ("log_probs",)

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> ObjectiveResult:
        loss = -(batch["loss_weight"] * batch["advantages"] * outputs["log_probs"]).sum()
        return ObjectiveResult(loss=loss + self.value)


class _Slope(torch.autograd.Function):
    """The value 0, with this gradient."""

    @staticmethod
    def forward(ctx: object, values: Tensor, slope: float) -> Tensor:
        ctx.slope, ctx.like = slope, values  # type: ignore[attr-defined]
        return values.new_zeros(())

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        like: Tensor = ctx.like  # type: ignore[attr-defined]
        return torch.full_like(like, ctx.slope) * gradient, None  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Reporting:
    """Reports metrics as objectives do: tensors and numbers, all negative, some only from some micro-batches; its loss
    is negative too."""

    outputs: Sequence[str] = ("log_probs",)

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> ObjectiveResult:
        log_probs = outputs["log_probs"]
        sums: dict[str, Tensor | float] = {"rows": float(batch.num_rows), "debt": -batch["loss_weight"].sum()}
        maxima: dict[str, Tensor | float] = {
            "lowest": -float(batch.lengths.min()),
            "highest": log_probs.max() - 1.0,
        }
        if bool((batch["row_id"] == int(batch.meta["reporting_row"])).any()):
            # First, so that the other names have another place than in micro-batches and ranks without this row.
            sums, maxima = {"of one row": -3.0, **sums}, {"of one row": torch.tensor(-4.0), **maxima}
        return ObjectiveResult(loss=(batch["loss_weight"] * log_probs).sum(), sums=sums, maxima=maxima)


@dataclass(frozen=True)
class Counting:
    """Reports counts whose sum and maximum single precision cannot represent: `LARGE` for a row, 1 for each other. The
    loss is this count too, and depends on no weight."""

    large_row: int
    outputs: Sequence[str] = ("log_probs",)

    LARGE = 2**25
    """Count of the large row: adding 1 to it is lost in float32."""

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> ObjectiveResult:
        large = int((batch["row_id"] == self.large_row).sum())
        count = float(large * self.LARGE + batch.num_rows - large)
        loss = outputs["log_probs"].sum() * 0.0 + count
        return ObjectiveResult(loss=loss, sums={"tokens": count}, maxima={"tokens": self.LARGE + 1.0})


@dataclass(frozen=True)
class Inspecting:
    """Checks its inputs: whole rows with all their fields, each row once, in passes within their limits."""

    tokens: int | None = None
    rows: int | None = None
    outputs: Sequence[str] = ("log_probs",)

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> ObjectiveResult:
        over = [
            self.tokens is not None and batch.num_rows > 1 and batch.num_tokens > self.tokens,
            self.rows is not None and batch.num_rows > self.rows,
        ]
        wrong = {
            "passes over their limit": any(over),
            "outputs that were not asked for": set(self.outputs) != outputs.keys(),
            "fields that are not their row's": not _is_in_step(batch),
            "numbers of the batch that are lost": batch.meta.get("of the batch") != 0.5,
            "floating-point fields and outputs that are not float32": any(
                t.is_floating_point() and t.dtype is not torch.float32
                for t in (*batch.tokens.values(), *batch.rows.values(), *outputs.values())
            ),
            "modes of torch that are not the caller's": bool(torch_modes() & UNUSUAL),
            "outputs of other rows": any(len(t) != batch.num_tokens for n, t in outputs.items() if n != "scores"),
        }
        sums = {"passes": 1.0, "rows": float(batch.num_rows), "identities": float(batch["row_id"].sum())}
        return ObjectiveResult(
            # The user's own fields affect the gradient.
            loss=(batch["own"][:, 1] * outputs["log_probs"]).sum(),
            sums=sums | {name: float(is_so) for name, is_so in wrong.items()},
        )


@dataclass(frozen=True)
class InspectingApart(Inspecting):
    """Declares that it does not need whole groups."""

    whole_groups: bool = False


def with_own_fields(batch: Batch) -> Batch:
    """The batch with the fields that `Inspecting` reads: per token, per row, and of the whole batch."""
    at = torch.arange(batch.num_tokens)
    own = torch.stack([batch["row_id"][batch.row_of_token].float(), batch["loss_weight"] * (1 + at % 5)], dim=1)
    rows = {
        "length": batch.lengths.clone(),
        "twice": batch["row_id"] * 2,
        "pair": batch["row_id"][:, None, None] + PAIR,
    }
    return (
        batch.with_tokens(own=own, place=batch.position_ids.clone(), cube=batch.position_ids[:, None, None] + PAIR)
        .with_rows(**rows)
        .with_meta(**{"of the batch": 0.5})
    )


def _is_in_step(batch: Batch) -> bool:
    return (
        torch.equal(batch["length"], batch.lengths)
        and torch.equal(batch["twice"], batch["row_id"] * 2)
        and torch.equal(batch["pair"], batch["row_id"][:, None, None] + PAIR.to(batch.lengths.device))
        and torch.equal(batch["place"], batch.position_ids)
        and torch.equal(batch["cube"], batch.position_ids[:, None, None] + PAIR.to(batch.lengths.device))
        and torch.equal(batch["own"][:, 0], batch["row_id"][batch.row_of_token].float())
    )


@dataclass(frozen=True)
class Comparing:
    """Compares rows of equal `uid`, so it must get them in one micro-batch: the loss is their squared distance."""

    outputs: Sequence[str] = ("log_probs",)
    whole_groups: bool = field(default=True)

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> ObjectiveResult:
        totals = batch.row_sum(batch["loss_weight"] * outputs["log_probs"])
        numbers, group = torch.unique(batch["uid"], return_inverse=True)
        size = torch.bincount(group, minlength=len(numbers)).to(totals)
        mean = totals.new_zeros(len(numbers)).index_add(0, group, totals) / size
        loss = ((totals - mean[group]) ** 2).sum()
        return ObjectiveResult(loss=100.0 * loss, sums={"groups": float(len(numbers))})
