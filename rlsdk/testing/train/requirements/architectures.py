"""Requirements: features that few architectures use but that change every number: capped logits, scaled rotary
positions, sliding windows, a vocabulary larger than a chunk. A backend may refuse such a model, but must not ignore the
feature."""

from __future__ import annotations

from typing import Any

import torch

from rlsdk.interfaces import Batch, Capability, ConfigError
from rlsdk.testing.suites.requirements import Measured, requirement
from rlsdk.testing.train.case_runner import drive
from rlsdk.testing.train.cases import Weighted, rows_of
from rlsdk.testing.train.lab import VARIANTS, TrainLab

LENGTHS = (70, 1, 19, 33, 2)
"""Lengths of rows: the difference of scaled positions grows with the position."""
ENTROPY = ("log_probs", "entropy")


class ArchitectureRequirements:
    """Mixed into `TrainConformance`."""

    @requirement("model.capped", since=(2, 0))
    def test_model_capped(self, lab: TrainLab, measured: Measured) -> None:
        """With a model that caps its logits by a tanh, outputs, gradients and steps are of the capped logits, divided
        by the temperature."""
        _like_plain(lab, measured, "capped", temperature=0.7)

    @requirement("model.scaled_positions", since=(2, 0))
    def test_model_scaled_positions(self, lab: TrainLab, measured: Measured) -> None:
        """Rotary positions that the configuration scales, by `llama3` and by `yarn`, are scaled in training; an
        unsupported kind is refused with a ConfigError."""
        for name in ("llama3 positions", "yarn positions"):
            _like_plain(lab, measured, name)

    @requirement("model.windows", since=(2, 0))
    def test_model_windows(self, lab: TrainLab, measured: Measured) -> None:
        """With a model whose layers use a sliding window, outputs, gradients and steps of rows longer than the window
        are the model's own."""
        _like_plain(lab, measured, "windows")

    @requirement("model.experts", since=(2, 0))
    def test_model_experts(self, lab: TrainLab, measured: Measured) -> None:
        """With a mixture of experts, outputs, gradients and steps are only of the objective, whatever router loss the
        configuration has, in micro-batches of any size."""
        for rows in (1, 5):
            _like_plain(lab, measured, "experts", limit=rows)

    @requirement("model.vocabulary", since=(2, 0))
    def test_model_vocabulary(self, lab: TrainLab, measured: Measured) -> None:
        """With a vocabulary of more than a thousand tokens, log-probs and entropy cover all of them, in every pass and
        in recomputation during the backward pass."""
        names = ENTROPY if Capability.ENTROPY in lab.spec.capabilities else ENTROPY[:1]
        for checkpointing in (False, True):
            _like_plain(lab, measured, "wide", names, temperature=1.4, checkpointing=checkpointing)


def _like_plain(
    lab: TrainLab,
    measured: Measured,
    variant: str,
    names: tuple[str, ...] = ENTROPY[:1],
    *,
    temperature: float = 1.0,
    limit: int = 2,
    **fields: Any,
) -> None:
    """Checks that outputs and two steps of a variant of the model, in micro-batches of `limit` rows, equal those of
    plain torch."""
    model = lab.variant(variant)
    if model is None:
        measured.record(f"models tried, {variant}", 0)
        return
    size = VARIANTS[variant].shape.get("vocab_size", 128)
    steps = [[_spread(rows_of(LENGTHS, seed=75 + at, temperature=temperature), size)] for at in range(2)]
    probe = _spread(rows_of(LENGTHS, seed=77, temperature=temperature), size), names
    case = lab.case(model=model, steps=steps, probe=probe, objective=Weighted(names), rows=limit, **fields)
    try:
        found = lab.run(drive, case)
    except ConfigError:
        measured.record(f"models tried, {variant}", 0)
        return
    where = f"{variant}, recomputed" if case.checkpointing else f"{variant}, rows {limit}"
    lab.holds_to_plain(measured, [found], case, where)


def _spread(batch: Batch, vocabulary: int) -> Batch:
    """The batch with tokens of the whole vocabulary, including its last one."""
    ids = batch["input_ids"] * vocabulary // 128
    return batch.with_tokens(input_ids=ids.index_fill(0, torch.tensor([4]), vocabulary - 1))
