"""Names and arithmetic of a step's numbers. `area/name`, seconds end in `_s`, shares lie in [0, 1]."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from rlsdk.interfaces import Batch

if TYPE_CHECKING:
    from rlsdk.trainer.grading import GradeSummary
    from rlsdk.trainer.hosts import MiniBatchResult


class StepClock:
    """Seconds by phase of one step. Phases may repeat; what no phase covers is `other`."""

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
        """Counts so many seconds of `phase`, which may still be measured, as those of another."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) - seconds
        self.seconds[to] = self.seconds.get(to, 0.0) + seconds

    def metrics(self) -> dict[str, float]:
        total = time.perf_counter() - self.start
        named = {f"time/{phase}_s": seconds for phase, seconds in self.seconds.items()}
        return {**named, "time/other_s": total - sum(self.seconds.values()), "time/step_s": total}


def batch_metrics(batch: Batch, summary: GradeSummary) -> dict[str, float]:
    """Reward, length and version figures of a step's samples.

    `policy/entropy` is an estimate: the mean of minus the log-prob of what was sampled, in nats.
    """
    scores = batch["scores"][batch["valid"]]
    mask = batch["response_mask"]
    lengths = batch.row_sum(mask.long()).float()
    return {
        "reward/mean": _mean(scores),
        "reward/std": float(scores.std(correction=0)) if len(scores) else 0.0,
        "reward/accuracy": summary.accuracy,
        **{f"reward/{name}": value for name, value in summary.terms.items()},
        "reward/invalid_share": summary.num_failed / summary.num_samples if summary.num_samples else 0.0,
        "response/tokens_mean": _mean(lengths),
        "response/tokens_max": float(lengths.max()) if len(lengths) else 0.0,
        "response/truncated_share": _mean(batch["truncated"].float()),
        "reward/groups_with_signal": _groups_with_signal(batch),
        "policy/entropy": _mean(-batch["rollout_log_probs"][mask]),
    }


def update_metrics(results: Sequence[MiniBatchResult]) -> dict[str, float]:
    """Mean over mini-batches of what is weighed by token, largest of what is not, and the optimizer's figures.

    The difference between the engines is that of the first mini-batch, before any weight has moved.
    """
    metrics = {"policy/loss": _average([r.update.loss for r in results])}
    first = _means(results[0])
    if "rollout_difference" in first:
        metrics["parity/log_prob_diff_mean"] = first["rollout_difference"]
        metrics["parity/log_prob_diff_max"] = results[0].update.maxima["rollout_difference"]
    for name in first.keys() - {"rollout_difference", "rollout_kl", "loss_weight"}:
        metrics[f"policy/{name}"] = _average([_means(r)[name] for r in results])
    return {
        **metrics,
        "policy/log_ratio_max": max(r.update.maxima.get("log_ratio", 0.0) for r in results),
        "policy/grad_norm": _average([r.step.grad_norm for r in results]),
        "policy/lr": results[-1].step.lr,
        "policy/skipped_updates": float(sum(r.step.skipped for r in results)),
        "policy/micro_batches": float(sum(r.update.num_micro_batches for r in results)),
    }


def _means(result: MiniBatchResult) -> dict[str, float]:
    """Weighed sums over their weight: 1 in a mean aggregation, less where rows carry no gradient."""
    weight = result.update.sums.get("loss_weight", 1.0) or 1.0
    return {name: value / weight for name, value in result.update.sums.items()}


def _groups_with_signal(batch: Batch) -> float:
    """Share of prompts whose samples did not all score alike: the others teach nothing to a group estimator. Samples
    without a score do not count; a prompt that has none with one is left out."""
    uid, scores = batch["uid"][batch["valid"]], batch["scores"][batch["valid"]]
    if not len(uid):
        return 0.0
    _, group = torch.unique(uid, return_inverse=True)
    count = int(group.max()) + 1
    low = torch.full((count,), float("inf")).scatter_reduce(0, group, scores, "amin")
    high = torch.full((count,), float("-inf")).scatter_reduce(0, group, scores, "amax")
    return float((high > low).float().mean())


def _mean(values: torch.Tensor) -> float:
    return float(values.float().mean()) if len(values) else 0.0


def _average(values: Sequence[float]) -> float:
    return sum(values) / len(values)
