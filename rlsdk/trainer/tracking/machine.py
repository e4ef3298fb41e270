"""How busy the controller's machine is, beside the metrics of a step."""

from __future__ import annotations

from collections.abc import Mapping

import psutil


def begin() -> None:
    """The next shares are those since this call."""
    psutil.cpu_percent(interval=None)


def machine_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Shares of all processors' time since the last call, and of main memory, by whatever runs on the machine; empty
    beside metrics of something else than a step, such as an evaluation."""
    if not any(name.endswith("/step_s") for name in metrics):
        return {}
    return {
        "throughput/cpu_share": psutil.cpu_percent(interval=None) / 100,
        "throughput/memory_share": psutil.virtual_memory().percent / 100,
    }
