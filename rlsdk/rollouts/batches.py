"""Groups to the batch that is trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlsdk.interfaces import Batch, FinishReason, Trajectory
from rlsdk.rollouts.group import Group, Sample

NO_VERSION = -1
"""Of tokens that no policy sampled."""


def make_batch(groups: Sequence[Group], *, temperature: float) -> Batch:
    """Rows of every sample that was made, group after group, by sample index.

    Fields: `input_ids`, `response_mask`, `rollout_log_probs`, `token_versions`; `row_id`, `uid` (the group's ordinal),
    `policy_version` and `last_policy_version` (of the first and the last sampled token), `truncated`, `scores`,
    `valid`; `baseline_scores` where groups have a greedy sample; `token_scores` where a reward gave some. Tokens that
    were given (prompt, tools) are off the mask, wherever they stand.
    """
    rows = [
        (group, sample, sample.trajectory)
        for group in groups
        for sample in group.samples
        if sample.trajectory is not None
    ]
    spans = [span for _, _, trajectory in rows for span in trajectory.spans]
    span_lengths = np.array([len(span) for span in spans], np.int64)
    sampled = np.array([span.sampled for span in spans], np.bool_)
    mask = np.repeat(sampled, span_lengths)
    log_probs = np.zeros(len(mask), np.float32)
    log_probs[mask] = _joined([span.log_probs for span in spans if span.log_probs is not None], np.float32)
    runs = [run for _, _, trajectory in rows for run in trajectory.versions]
    versions = np.full(len(mask), NO_VERSION, np.int64)
    versions[mask] = np.repeat(
        np.array([run.version for run in runs], np.int64), np.array([run.num_tokens for run in runs], np.int64)
    )
    reasons = [trajectory.finish_reason is FinishReason.LENGTH for _, _, trajectory in rows]
    return Batch(
        lengths=torch.tensor([trajectory.num_tokens for _, _, trajectory in rows], dtype=torch.int64),
        tokens={
            "input_ids": torch.from_numpy(_joined([span.token_ids for span in spans], np.int64)),
            "response_mask": torch.from_numpy(mask),
            "rollout_log_probs": torch.from_numpy(log_probs),
            "token_versions": torch.from_numpy(versions),
            **_token_scores([(sample, trajectory) for _, sample, trajectory in rows], mask),
        },
        rows={
            "row_id": torch.arange(len(rows)),
            "uid": torch.tensor([group.task.ordinal for group, _, _ in rows], dtype=torch.int64),
            "policy_version": torch.tensor([_first(trajectory) for _, _, trajectory in rows], dtype=torch.int64),
            "last_policy_version": torch.tensor([_last(trajectory) for _, _, trajectory in rows], dtype=torch.int64),
            "truncated": torch.tensor(reasons, dtype=torch.bool),
            "scores": torch.tensor([sample.grade.score for _, sample, _ in rows], dtype=torch.float32),
            "valid": torch.tensor([sample.grade.valid for _, sample, _ in rows], dtype=torch.bool),
            **_baselines([group for group, _, _ in rows]),
        },
        meta={"temperature": temperature},
    )


def _token_scores(rows: Sequence[tuple[Sample, Trajectory]], mask: NDArray[np.bool_]) -> dict[str, torch.Tensor]:
    """`[N]`: 0 in rows without any, and on tokens that the policy did not sample."""
    if all(sample.grade.token_scores is None for sample, _ in rows):
        return {}
    scores = np.zeros(len(mask), np.float32)
    end = 0
    for sample, trajectory in rows:
        start, end = end, end + trajectory.num_tokens
        if sample.grade.token_scores is not None:
            scores[start + len(trajectory.spans[0]) : end] = sample.grade.token_scores
    return {"token_scores": torch.from_numpy(np.where(mask, scores, np.float32(0.0)))}


def _baselines(groups: Sequence[Group]) -> dict[str, torch.Tensor]:
    """Score of each row's greedy sibling; NaN where that failed."""
    if not any(group.task.greedy_baseline for group in groups):
        return {}
    found = [group.baseline for group in groups]
    scores = [one.total if one is not None and one.grade.valid else float("nan") for one in found]
    return {"baseline_scores": torch.tensor(scores, dtype=torch.float32)}


def _first(trajectory: Trajectory) -> int:
    versions = trajectory.versions
    return versions[0].version if versions else NO_VERSION


def _last(trajectory: Trajectory) -> int:
    versions = trajectory.versions
    return versions[-1].version if versions else NO_VERSION


def _joined(parts: Sequence[NDArray[Any]], dtype: type) -> NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *parts]).astype(dtype, copy=False)
