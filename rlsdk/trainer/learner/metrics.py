"""Names and computation of a step's metrics: `area/name`; seconds end in `_s`, shares are in [0, 1]."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from rlsdk.algorithms import Samples, explained_variance, group_signal, score_dtype, update_means
from rlsdk.interfaces import Batch, Head, SyncReport

if TYPE_CHECKING:
    from rlsdk.trainer.inputs.grading import GradeSummary
    from rlsdk.trainer.roles.hosts import MiniBatchResult


SPECIAL = "response/special_share"
"""Share of responses with a special token that is no stop token; only written above 0."""


class StepClock:
    """Seconds of one step by phase. Phases may repeat; time outside all phases is `other`."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - begin

    def move(self, phase: str, to: str, seconds: float) -> None:
        """Moves seconds from `phase`, which may still be running, to the phase `to`."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) - seconds
        self.seconds[to] = self.seconds.get(to, 0.0) + seconds

    def metrics(self) -> dict[str, float]:
        total = time.perf_counter() - self.start
        named = {f"time/{phase}_s": seconds for phase, seconds in self.seconds.items()}
        return {**named, "time/other_s": max(total - sum(self.seconds.values()), 0.0), "time/step_s": total}


def batch_metrics(batch: Batch, summary: GradeSummary, *, has_entropy: bool = True) -> dict[str, float]:
    """Reward, length and entropy metrics of a step's samples.

    Args:
        batch: the step's batch.
        summary: of its grades.
        has_entropy: whether minus the mean log-prob of the sampled tokens, in nats, estimates the entropy: see
            `samples_whole_distribution`. Otherwise it is `policy/sample_nll`.
    """
    dtype, samples = score_dtype(batch), Samples.of(batch)
    totals = samples.of_rows(batch["scores"]).to(dtype)
    if "token_scores" in batch:
        totals = totals + samples.token_sum(batch["token_scores"].to(dtype))
    scores = totals[samples.valid]
    lengths = samples.lengths.float()
    return {
        "reward/mean": _mean(scores),
        "reward/std": float(scores.std(correction=0)) if len(scores) else 0.0,
        **({} if math.isnan(summary.accuracy) else {"reward/accuracy": summary.accuracy}),
        **{f"reward/{name}": value for name, value in summary.metrics().items()},
        "reward/invalid_share": summary.num_failed / summary.num_samples if summary.num_samples else 0.0,
        "response/tokens_mean": _mean(lengths),
        "response/tokens_max": float(lengths.max()) if len(lengths) else 0.0,
        "response/truncated_share": _mean(samples.of_rows(batch["truncated"]).float()),
        "reward/groups_with_signal": group_signal(batch).share,
        "policy/entropy" if has_entropy else "policy/sample_nll": _mean(
            -batch["rollout_log_probs"][batch["response_mask"]]
        ),
    }


def sync_metrics(report: SyncReport) -> dict[str, float]:
    """Bytes of a sync, and of an adapter that is sent alone what it does."""
    apart = {"sync/base_bytes": report.base_bytes, "sync/adapter_effect": report.effect}
    return {
        "sync/bytes": float(report.num_bytes),
        "sync/moved_bytes": float(report.moved_bytes),
        **{name: float(value) for name, value in apart.items() if value is not None},
    }


def special_share(batch: Batch, special: Collection[int]) -> float:
    """Share of the samples in which the policy sampled one of these tokens."""
    is_special = (
        torch.isin(batch["input_ids"], torch.tensor(sorted(special), dtype=torch.int64)) & batch["response_mask"]
    )
    return _mean((Samples.of(batch).token_sum(is_special.long()) > 0).float())


def actor_metrics(results: Sequence[MiniBatchResult]) -> dict[str, float]:
    """Metrics of the step's actor updates: means, maxima of metrics that are not weighted by token, and the optimizer's
    metrics. Empty if the policy was not updated.

    The log-prob difference between the engines is taken from the first mini-batch, before any weight changes.
    """
    if not results:
        return {}
    metrics = {"policy/loss": _average([r.update.loss for r in results])}
    first = update_means([results[0].update.sums])
    if "rollout_difference" in first:
        metrics["parity/log_prob_diff_mean"] = first["rollout_difference"]
        metrics["parity/log_prob_diff_max"] = results[0].update.maxima["rollout_difference"]
    means = update_means([r.update.sums for r in results])
    for name in means.keys() - {"rollout_difference", "rollout_kl"}:
        metrics[f"policy/{name}"] = means[name]
    added = update_means([each.sums for r in results for each in r.added])
    metrics |= {f"policy/ptx_{name.removeprefix('sft_')}": value for name, value in added.items()}
    return {
        **metrics,
        "policy/log_ratio_max": max(r.update.maxima.get("log_ratio", 0.0) for r in results),
        **_optimizer_metrics("policy", results),
    }


def critic_metrics(results: Sequence[MiniBatchResult]) -> dict[str, float]:
    """Metrics of the critic's updates, with the explained variance of the returns. Empty without a critic."""
    if not results:
        return {}
    means = update_means([r.update.sums for r in results])
    explained = explained_variance(means)
    return {
        "critic/loss": _average([r.update.loss for r in results]),
        "critic/value_mean": means["value"],
        "critic/return_mean": means["return"],
        "critic/clip_fraction": means["value_clip_fraction"],
        **({"critic/explained_variance": explained} if math.isfinite(explained) else {}),
        **_optimizer_metrics("critic", results),
    }


UPDATE_METRICS = {Head.LM: actor_metrics, Head.VALUE: critic_metrics}
"""Metrics of the updates of a trained role, by its head."""


def _optimizer_metrics(area: str, results: Sequence[MiniBatchResult]) -> dict[str, float]:
    return {
        f"{area}/grad_norm": _average([r.step.grad_norm for r in results]),
        f"{area}/lr": results[-1].step.lr,
        f"{area}/skipped_updates": float(sum(r.step.skipped for r in results)),
        f"{area}/micro_batches": float(sum(r.update.num_micro_batches for r in results)),
    }


def _mean(values: torch.Tensor) -> float:
    return float(values.mean()) if len(values) else 0.0


def _average(values: Sequence[float]) -> float:
    return sum(values) / len(values)
