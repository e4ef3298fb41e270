"""Selects the metrics that are the seconds of a step's phases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

WHOLE = "time/step_s"
BESIDE = frozenset(
    {"time/wait_prev_gen_s", "time/publish_s", "time/publish_lag_s", "time/hold_s", "time/controller_cpu_s"}
)
"""Metrics in seconds that are not phases of a step: they overlap with phases, or are part of one."""
REUSED = "throughput/reused_samples"
"""Metric: samples of a step that a resumed run took from its journal, and which therefore took no time in it. Absent if
there are none."""


def has_own_time(metrics: Mapping[str, float]) -> bool:
    """Whether the seconds and rates of a step are those of steps to come: no sample of it was made before a resume."""
    seconds = [metrics[name] for name in phase_names(metrics)]
    return not metrics.get(REUSED) and all(isinstance(each, int | float) and each >= 0 for each in seconds)


def phase_names(metrics: Iterable[str]) -> list[str]:
    """Names of the metrics that are the seconds of a phase or of the evaluation; excludes the total."""
    return [
        name
        for name in metrics
        if name.startswith("time/") and name.endswith("_s") and name != WHOLE and name not in BESIDE
    ]
