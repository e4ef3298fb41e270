"""What reward models add to the scores of a step's samples."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlsdk.algorithms import Samples, reduce_steps, step_scores
from rlsdk.interfaces import Batch
from rlsdk.trainer.inputs.step_ends import StepReader


def with_step_ends(batch: Batch, readers: Mapping[str, StepReader]) -> Batch:
    """Adds, for each process reward model, `step_end.ROLE` `[N]` bool: the last tokens of steps."""
    return batch.with_tokens(**{_field(role): reader.mark(batch) for role, reader in readers.items()})


def add_scores(batch: Batch, given: Tensor, weight: float, role: str) -> tuple[Batch, Mapping[str, float]]:
    """Adds weighted scores `[S]` to those of the samples; returns the metrics."""
    added = Samples.of(batch).add_to_scores(weight * given.double())
    return added, {f"reward/{role}": float(given.mean()) if len(given) else 0.0}


def add_step_scores(
    batch: Batch, values: Tensor, weight: float, role: str, how: str
) -> tuple[Batch, Mapping[str, float]]:
    """Adds the scores of steps: each at its last token, or reduced to one per sample; returns the metrics.

    Args:
        batch: with `step_end.ROLE`.
        values: `[N]`, of the process reward model.
        weight: of its scores.
        role: of the model.
        how: `each`, or how the scores of a sample's steps become one.
    """
    ends, samples = batch[_field(role)], Samples.of(batch)
    found = step_scores(batch, ends, values)
    counted = {f"reward/{role}/steps": float(ends.sum()) / max(samples.count, 1)}
    if how != "each":
        batch, metrics = add_scores(batch, reduce_steps(samples, ends, found, how), weight, role)
        return batch, {**metrics, **counted}
    given = batch["token_scores"] if "token_scores" in batch else torch.zeros_like(found)
    mean = float(found[ends].mean()) if ends.any() else 0.0
    return batch.with_tokens(token_scores=given + weight * found), {f"reward/{role}": mean, **counted}


def _field(role: str) -> str:
    return f"step_end.{role}"
