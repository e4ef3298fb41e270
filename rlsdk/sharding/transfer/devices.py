"""Identifies physical devices: `cuda:0` is ambiguous if every process of a node numbers its own devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlsdk.interfaces import WeightLayout


def on_physical_device(layout: WeightLayout, accelerators: Sequence[str]) -> WeightLayout:
    """The layout with its device `cuda:N` replaced by the name `accelerators[N]`. Unchanged on a CPU, and if the
    devices are unknown."""
    kind, _, number = layout.device.partition(":")
    at = int(number or 0)
    return replace(layout, device=f"{kind}:{accelerators[at]}") if at < len(accelerators) and kind != "cpu" else layout
