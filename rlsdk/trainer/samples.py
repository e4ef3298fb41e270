"""Samples to be looked at: a few of a step, with their text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlsdk.interfaces import Batch
from rlsdk.rollouts import Group


def shown_samples(groups: Sequence[Group], batch: Batch, count: int) -> list[Mapping[str, Any]]:
    """Up to `count` samples, one from each of several prompts. `batch` holds a row for each sample that was made."""
    made = [(group, sample) for group in groups for sample in group.samples if sample.trajectory is not None]
    stride = max(len(made) // max(count, 1), 1)
    rows = list(range(0, len(made), stride))[:count]
    picked = batch.select(rows)
    tokens = picked.row_sum(picked["response_mask"].long()).clamp(min=1)
    advantages = (picked.row_sum(picked["advantages"]) / tokens).tolist()
    return [
        {
            "prompt": made[row][0].task.prompt.text,
            "response": made[row][1].text,
            "answer": made[row][0].task.prompt.answer,
            "score": made[row][1].total,
            **{f"reward/{name}": value for name, value in made[row][1].grade.terms.items()},
            "advantage": advantage,
        }
        for row, advantage in zip(rows, advantages, strict=True)
    ]
