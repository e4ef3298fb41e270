"""Identifies physical devices: `cuda:0` is ambiguous if every process of a node numbers its own devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from rlsdk.interfaces import WeightLayout


def on_physical_device(layout: WeightLayout, accelerators: Sequence[str]) -> WeightLayout:
    """The layout with its device `cuda:N` replaced by the name `accelerators[N]`. Unchanged on a CPU, and if the
    devices are unknown."""
    kind, _, number = layout.device.partition(":")
    at = int(number or 0)
    return replace(layout, device=f"{kind}:{accelerators[at]}") if at < len(accelerators) and kind != "cpu" else layout


def own_device(layout: WeightLayout) -> torch.device | None:
    """The GPU of a layout that this process's own engine described, in this process's numbering; None on a CPU."""
    kind, _, number = layout.device.partition(":")
    return torch.device(kind, int(number or 0)) if kind == "cuda" and torch.cuda.is_available() else None


def current_device() -> torch.device | None:
    """The GPU that this thread uses; None if its process uses none."""
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.device("cuda", torch.cuda.current_device()) if used else None
