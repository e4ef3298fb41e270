"""Plans a run: placement, batch sizes, weight transfer, memory and times. Takes no device, starts no Ray, reads no
weights."""

from __future__ import annotations

from rlsdk.planning.calibration import Calibration, read_calibration
from rlsdk.planning.changes import changes, smallest
from rlsdk.planning.hardware import Hardware, parse_hardware, this_machine
from rlsdk.planning.plan import RunPlan, make_plan, weight_layouts
from rlsdk.planning.text import show

__all__ = ["Calibration", "Hardware", "RunPlan", "changes", "make_plan", "parse_hardware", "read_calibration",
           "show", "smallest", "this_machine", "weight_layouts"]  # fmt: skip
