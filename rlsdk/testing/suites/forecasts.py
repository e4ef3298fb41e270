"""Compares a backend's forecasts with the engine's own layouts."""

from __future__ import annotations

from rlsdk.interfaces import Forecast, WeightLayout


def senseless(found: Forecast, ranks: int) -> list[str]:
    """Values of a forecast that are impossible."""
    faults = (
        [] if len(found.layouts) == len(found.memory) == ranks else ["layouts or memory of another number of ranks"]
    )
    for memory in found.memory:
        amounts = {name: value for name, value in vars(memory).items() if name.endswith("_bytes")}
        faults += [f"{name} is {value!r}" for name, value in amounts.items() if value is not None and value < 0]
        faults += [f"{n} is {v!r}, no whole number" for n, v in amounts.items() if not isinstance(v, int | None)]
    return faults


def differences(forecast: WeightLayout, layout: WeightLayout) -> list[str]:
    """Differences of a forecast layout from the engine's own."""
    faults = [name for name in ("rank", "node", "device") if getattr(forecast, name) != getattr(layout, name)]
    metas = ({meta.name: meta for meta in one.tensors} for one in (forecast, layout))
    mine, theirs = metas
    faults += [f"tensor {n}: {mine.get(n)}, {theirs.get(n)}" for n in sorted(mine.keys() | theirs.keys())
               if mine.get(n) != theirs.get(n)]  # fmt: skip
    faults += [f"box {box}" for box in set(forecast.boxes) ^ set(layout.boxes)]
    return faults + (["tied names"] if dict(forecast.tied) != dict(layout.tied) else [])
