"""Packs groups into the training batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlsdk.interfaces import Batch, BatchError, Span, VersionRun
from rlsdk.rollouts.groups.group import Group, Sample

NO_VERSION = -1
"""Version of tokens that were not sampled by the policy."""


def make_batch(groups: Sequence[Group], *, temperature: float) -> Batch:
    """Makes a batch with every row of every finished sample, ordered by group, sample and row. Nothing else makes rows
    of samples.

    Fields: `input_ids`, `response_mask`, `rollout_log_probs`, `token_versions`; `row_id`, `uid` (the group's ordinal),
    `sample` (the sample's index in its group), `policy_version` and `last_policy_version` (of the row's first and last
    sampled token), `truncated`, `scores`, `valid`; `baseline_scores` if groups have a greedy sample; `token_scores` if
    a reward gave any; `chain` if a sample has several, `chain_scores` if a chain has a score of its own, `row_scale` if
    a row has one. Given tokens (prompt, tools) are False in the mask at every position.

    Raises:
        BatchError: two groups have the same ordinal, so that their samples could not be told apart.
    """
    _check_groups(groups)
    members = [(group, index, sample) for group in groups for index, sample in enumerate(group.samples)]
    rows = [(group, index, sample, row) for group, index, sample in members for row in sample.rows]
    trajectories = [row for _, _, _, row in rows]
    spans = [span for trajectory in trajectories for span in trajectory.spans]
    span_lengths = np.array([len(span.token_ids) for span in spans], np.int64)
    mask = np.repeat(np.array([span.log_probs is not None for span in spans], np.bool_), span_lengths)
    row_runs = [trajectory.versions for trajectory in trajectories]
    return Batch(
        lengths=torch.from_numpy(_row_lengths(span_lengths, [len(trajectory.spans) for trajectory in trajectories])),
        tokens={
            "input_ids": torch.from_numpy(_joined([span.token_ids for span in spans], np.int64)),
            "response_mask": torch.from_numpy(mask),
            "rollout_log_probs": torch.from_numpy(_log_probs(spans)),
            "token_versions": torch.from_numpy(_token_versions(spans)),
            **_token_scores([sample for _, _, sample in members], mask),
        },
        rows={
            "row_id": torch.arange(len(rows)),
            "uid": torch.tensor([group.task.ordinal for group, _, _, _ in rows], dtype=torch.int64),
            "sample": torch.tensor([index for _, index, _, _ in rows], dtype=torch.int64),
            "policy_version": _versions([of_row[0] if of_row else None for of_row in row_runs]),
            "last_policy_version": _versions([of_row[-1] if of_row else None for of_row in row_runs]),
            "truncated": torch.tensor([sample.truncated for _, _, sample, _ in rows], dtype=torch.bool),
            "scores": torch.tensor([sample.grade.score for _, _, sample, _ in rows], dtype=torch.float64),
            "valid": torch.tensor([sample.grade.valid for _, _, sample, _ in rows], dtype=torch.bool),
            **_of_rows([sample for _, _, sample in members]),
            **_baselines([group for group, _, _, _ in rows]),
        },
        meta={"temperature": temperature},
    )


def _check_groups(groups: Sequence[Group]) -> None:
    """Raises `BatchError` where groups share an ordinal."""
    first: dict[int, Group] = {}
    for group in groups:
        other = first.setdefault(group.task.ordinal, group)
        if other is not group:
            raise BatchError(
                f"groups {other.task.id} and {group.task.id} both have the ordinal {group.task.ordinal}, which is the "
                "uid of their rows; every group of a step needs its own"
            )


def _row_lengths(span_lengths: NDArray[np.int64], num_spans: Sequence[int]) -> NDArray[np.int64]:
    """`[B]`: tokens of each row."""
    ends = np.concatenate([[0], np.cumsum(span_lengths)])[np.concatenate([[0], np.cumsum(num_spans)]).astype(np.int64)]
    return np.diff(ends).astype(np.int64)


def _log_probs(spans: Sequence[Span]) -> NDArray[np.float32]:
    """`[N]`: 0 for given tokens."""
    zeros = np.zeros(max([len(span.token_ids) for span in spans if span.log_probs is None], default=0), np.float32)
    parts = [zeros[: len(span.token_ids)] if span.log_probs is None else span.log_probs for span in spans]
    return _joined(parts, np.float32)


def _token_versions(spans: Sequence[Span]) -> NDArray[np.int64]:
    """`[N]`: `NO_VERSION` for given tokens."""
    versions, counts = [], []
    for span in spans:
        if span.log_probs is None:
            versions.append(NO_VERSION)
            counts.append(len(span.token_ids))
        for run in span.versions:
            versions.append(run.version)
            counts.append(run.num_tokens)
    return np.repeat(np.array(versions, np.int64), np.array(counts, np.int64))


def _token_scores(samples: Sequence[Sample], mask: NDArray[np.bool_]) -> dict[str, torch.Tensor]:
    """Token scores `[N]`: 0 in samples without any, and on tokens that the policy did not sample."""
    if all(sample.grade.token_scores is None for sample in samples if sample.rows):
        return {}
    scores = np.zeros(len(mask))
    end = 0
    for sample in samples:
        given = 0
        for row in sample.rows:
            start, end = end + len(row.spans[0]), end + row.num_tokens
            if sample.grade.token_scores is not None:
                scores[start:end] = sample.grade.token_scores[given : given + end - start]
                given += end - start
    return {"token_scores": torch.from_numpy(np.where(mask, scores, 0.0))}


def _of_rows(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """Chain and scale of each row, and its chain's score; a field is absent where all rows have the same as a plain
    sample."""
    made = [(sample, sample.episode) for sample in samples if sample.episode is not None]
    episodes = [episode for _, episode in made]
    fields = {}
    of_rows = [(sample, chain) for sample, one in made for chain in one.chains or (0,) * len(one.rows)]
    if any(len({*episode.chains}) > 1 for episode in episodes):
        fields["chain"] = torch.tensor([chain for _, chain in of_rows], dtype=torch.int64)
    if any(sample.chain_scores for sample, _ in made):
        own = {id(sample): sample.chain_scores for sample, _ in made}
        scores = [own[id(sample)].get(chain, sample.grade.score) for sample, chain in of_rows]
        fields["chain_scores"] = torch.tensor(scores, dtype=torch.float64)
    if any(scale != 1 for episode in episodes for scale in episode.scales):
        scales = [scale for episode in episodes for scale in episode.scales or (1.0,) * len(episode.rows)]
        fields["row_scale"] = torch.tensor(scales, dtype=torch.float64)
    return fields


def _baselines(groups: Sequence[Group]) -> dict[str, torch.Tensor]:
    """Score of each row's greedy baseline sample; NaN if that sample failed."""
    if not any(group.task.greedy_baseline for group in groups):
        return {}
    baselines = [group.baseline for group in groups]
    scores = [one.total if one is not None and one.grade.valid else float("nan") for one in baselines]
    return {"baseline_scores": torch.tensor(scores, dtype=torch.float64)}


def _versions(runs: Sequence[VersionRun | None]) -> torch.Tensor:
    return torch.tensor([NO_VERSION if run is None else run.version for run in runs], dtype=torch.int64)


def _joined(parts: Sequence[NDArray[Any]], dtype: type) -> NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *parts]).astype(dtype, copy=False)
