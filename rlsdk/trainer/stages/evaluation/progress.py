"""Progress over the evaluations of a run: best value so far, and whether it still improves. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from rlsdk.config import EarlyStoppingConfig, WatchConfig
from rlsdk.interfaces import CheckpointError, ConfigError, nearest


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

    NaN is never better. Before the first step there is no checkpoint that could be the best one.

    Raises:
        ConfigError: a metric that is watched was not measured.
    """
    if best.metric is not None and step > 0:
        found = _measured(best.metric, metrics, "checkpoint.best.metric")
        if _is_better(found, progress.best, best.mode, 0.0):
            progress = replace(progress, best=Best(metric=best.metric, mode=best.mode, value=found, step=step))
    if stopping.metric is None:
        return progress
    found = _measured(stopping.metric, metrics, "eval.early_stopping.metric")
    if _is_better(found, progress.leader, stopping.mode, stopping.min_delta):
        leader = Best(metric=stopping.metric, mode=stopping.mode, value=found, step=step)
        return replace(progress, leader=leader, waited=0)
    return replace(progress, waited=progress.waited + 1)


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


def _measured(metric: str, metrics: Mapping[str, float], field: str) -> float:
    if metric not in metrics:
        known = sorted(name for name in metrics if not name.startswith("time/"))
        near = nearest(metric, known) or f"; there are {known}"
        raise ConfigError(f"{field}: {metric!r} was not measured{near}")
    return metrics[metric]


def _kept(data: Any, watch: WatchConfig) -> Best | None:
    if data is None:
        return None
    found = Best(metric=str(data["metric"]), mode=str(data["mode"]), value=float(data["value"]), step=int(data["step"]))
    return found if (found.metric, found.mode) == (watch.metric, watch.mode) else None
