"""Progress over the evaluations of a run: best value so far, and whether it still improves. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from rlsdk.config import EarlyStoppingConfig, WatchConfig
from rlsdk.interfaces import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Best:
    """The best value of a metric so far."""

    metric: str
    mode: str
    value: float
    step: int
    """Step after which it was measured; 0: before the first step."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Best value and early-stopping count; saved in checkpoints so that a resumed run continues counting."""

    best: Best | None = None
    """Best value of the metric of `checkpoint.best`; its step has a checkpoint."""
    leader: Best | None = None
    """Best value of the metric of `eval.early_stopping`, to which later values are compared."""
    waited: int = 0
    """Number of evaluations since `leader` without improvement."""

    def dump(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def load(cls, data: Mapping[str, Any], best: WatchConfig, stopping: EarlyStoppingConfig) -> Progress:
        """Restores what `dump` returned; values of another metric or the opposite direction are dropped.

        Raises:
            CheckpointError: the data is of another version of rlsdk.
        """
        try:
            kept, leader = _kept(data["best"], best), _kept(data["leader"], stopping)
            waited = int(data["waited"]) if leader is not None else 0
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the checkpoint's record of evaluations cannot be read: {error!r}") from error
        return cls(best=kept, leader=leader, waited=waited)


def after_evaluation(
    progress: Progress, step: int, metrics: Mapping[str, float], best: WatchConfig, stopping: EarlyStoppingConfig
) -> Progress:
    """Returns the progress updated with one more evaluation.

    NaN is never better, and an evaluation without the metric counts for nothing. Before the first step there is no
    checkpoint that could be the best one.
    """
    value = None if best.metric is None else metrics.get(best.metric)
    if value is not None and step > 0 and _is_better(value, progress.best, best.mode, 0.0):
        progress = replace(progress, best=Best(metric=str(best.metric), mode=best.mode, value=value, step=step))
    value = None if stopping.metric is None else metrics.get(stopping.metric)
    if value is None:
        return progress
    if _is_better(value, progress.leader, stopping.mode, stopping.min_delta):
        leader = Best(metric=str(stopping.metric), mode=stopping.mode, value=value, step=step)
        return replace(progress, leader=leader, waited=0)
    return replace(progress, waited=progress.waited + 1)


def unmeasured(metrics: Mapping[str, float], best: WatchConfig, stopping: WatchConfig) -> Iterator[str]:
    """What is said of metrics that something depends on and an evaluation did not report."""
    effects = {
        "checkpoint.best.metric": (best.metric, "no checkpoint of this step can be the best"),
        "eval.early_stopping.metric": (stopping.metric, "it does not count for early stopping"),
    }
    for field, (metric, effect) in effects.items():
        if metric is not None and metric not in metrics:
            yield f"{field} {metric!r} is not among the figures of this evaluation, so {effect}{_why_absent(metric)}"


def _why_absent(metric: str) -> str:
    """Why a metric that other evaluations may report is absent."""
    if "maj@" in metric or "answered_share" in metric:
        return " (no response marks an answer)"
    if "pass@" in metric:
        return " (no prompt has so many graded samples)"
    return " (no sample was without a grade)" if "invalid_share" in metric else ""


def why_ended(progress: Progress, stopping: EarlyStoppingConfig) -> str | None:
    """Reason for stopping early; None while the run continues."""
    if stopping.metric is None or progress.waited < stopping.patience:
        return None
    evaluations = "one evaluation" if progress.waited == 1 else f"{progress.waited} evaluations in a row"
    than = f"{progress.leader.value:.4g} (after step {progress.leader.step})" if progress.leader else "NaN"
    by = f" by more than {stopping.min_delta:g}" if stopping.min_delta else ""
    return (
        f"stopped early: {evaluations} without a better {stopping.metric} than {than}{by} "
        f"(eval.early_stopping.patience is {stopping.patience})"
    )


def _is_better(value: float, best: Best | None, mode: str, min_delta: float) -> bool:
    if math.isnan(value):
        return False
    if best is None:
        return True
    return value > best.value + min_delta if mode == "max" else value < best.value - min_delta


def _kept(data: Any, watch: WatchConfig) -> Best | None:
    if data is None:
        return None
    best = Best(metric=str(data["metric"]), mode=str(data["mode"]), value=float(data["value"]), step=int(data["step"]))
    return best if (best.metric, best.mode) == (watch.metric, watch.mode) else None
