"""Packs groups into the training batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlsdk.interfaces import Batch, FinishReason, Trajectory, VersionRun
from rlsdk.rollouts.groups.group import Group, Sample

NO_VERSION = -1
"""Version of tokens that were not sampled by the policy."""


def make_batch(groups: Sequence[Group], *, temperature: float) -> Batch:
    """Makes a batch with a row for every finished sample, ordered by group and sample index.

    Fields: `input_ids`, `response_mask`, `rollout_log_probs`, `token_versions`; `row_id`, `uid` (the group's ordinal),
    `policy_version` and `last_policy_version` (of the first and the last sampled token), `truncated`, `scores`,
    `valid`; `baseline_scores` if groups have a greedy sample; `token_scores` if a reward gave any. Given tokens
    (prompt, tools) are False in the mask at every position.
    """
    rows = [
        (group, sample, sample.trajectory)
        for group in groups
        for sample in group.samples
        if sample.trajectory is not None
    ]
    spans = [span for _, _, trajectory in rows for span in trajectory.spans]
    span_lengths = np.array([len(span.token_ids) for span in spans], np.int64)
    mask = np.repeat(np.array([span.log_probs is not None for span in spans], np.bool_), span_lengths)
    log_probs = np.zeros(len(mask), np.float32)
    log_probs[mask] = _joined([span.log_probs for span in spans if span.log_probs is not None], np.float32)
    row_runs = [trajectory.versions for _, _, trajectory in rows]
    runs = [run for found in row_runs for run in found]
    versions = np.full(len(mask), NO_VERSION, np.int64)
    versions[mask] = np.repeat(
        np.array([run.version for run in runs], np.int64), np.array([run.num_tokens for run in runs], np.int64)
    )
    reasons = [trajectory.finish_reason is FinishReason.LENGTH for _, _, trajectory in rows]
    return Batch(
        lengths=torch.from_numpy(_row_lengths(span_lengths, [len(trajectory.spans) for _, _, trajectory in rows])),
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
            "policy_version": _versions([found[0] if found else None for found in row_runs]),
            "last_policy_version": _versions([found[-1] if found else None for found in row_runs]),
            "truncated": torch.tensor(reasons, dtype=torch.bool),
            "scores": torch.tensor([sample.grade.score for _, sample, _ in rows], dtype=torch.float64),
            "valid": torch.tensor([sample.grade.valid for _, sample, _ in rows], dtype=torch.bool),
            **_baselines([group for group, _, _ in rows]),
        },
        meta={"temperature": temperature},
    )


def _row_lengths(span_lengths: NDArray[np.int64], num_spans: Sequence[int]) -> NDArray[np.int64]:
    """`[B]`: tokens of each row."""
    ends = np.concatenate([[0], np.cumsum(span_lengths)])[np.concatenate([[0], np.cumsum(num_spans)]).astype(np.int64)]
    return np.diff(ends).astype(np.int64)


def _token_scores(rows: Sequence[tuple[Sample, Trajectory]], mask: NDArray[np.bool_]) -> dict[str, torch.Tensor]:
    """Token scores `[N]`: 0 in rows without any, and on tokens that the policy did not sample."""
    if all(sample.grade.token_scores is None for sample, _ in rows):
        return {}
    scores = np.zeros(len(mask))
    end = 0
    for sample, trajectory in rows:
        start, end = end, end + trajectory.num_tokens
        if sample.grade.token_scores is not None:
            scores[start + len(trajectory.spans[0]) : end] = sample.grade.token_scores
    return {"token_scores": torch.from_numpy(np.where(mask, scores, 0.0))}


def _baselines(groups: Sequence[Group]) -> dict[str, torch.Tensor]:
    """Score of each row's greedy baseline sample; NaN if that sample failed."""
    if not any(group.task.greedy_baseline for group in groups):
        return {}
    found = [group.baseline for group in groups]
    scores = [one.total if one is not None and one.grade.valid else float("nan") for one in found]
    return {"baseline_scores": torch.tensor(scores, dtype=torch.float64)}


def _versions(runs: Sequence[VersionRun | None]) -> torch.Tensor:
    return torch.tensor([NO_VERSION if run is None else run.version for run in runs], dtype=torch.int64)


def _joined(parts: Sequence[NDArray[Any]], dtype: type) -> NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *parts]).astype(dtype, copy=False)
