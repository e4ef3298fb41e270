"""`rlsdk plan`: shows placement, batches and memory of `rlsdk train` with the same arguments; uses no device."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from rlsdk.api.machine import run_plan
from rlsdk.api.settings import Settings
from rlsdk.planning import RunPlan, show
from rlsdk.system.streams import stdout_aside
from rlsdk.views.terminal import SafeConsole

EXIT_DOES_NOT_FIT = 1
SCHEMA = 2
"""Version of the output of `--json`; increases when a field is removed or changes its meaning."""


def run(args: Sequence[str], *, hardware: str | None, calibration: Path | None, as_json: bool) -> None:
    """Prints the plan; exits with code 1 if the run does not fit."""
    with stdout_aside() if as_json else nullcontext():
        plan = run_plan(Settings(flags=args), hardware=hardware, calibration=calibration)
    if as_json:
        print(json.dumps(record(plan), indent=2))
    else:
        console: Console = SafeConsole(file=sys.stdout, highlight=False)
        if not console.is_terminal:
            console = SafeConsole(file=sys.stdout, highlight=False, width=shutil.get_terminal_size().columns)
        show(plan, console)
    if plan.fits is False:
        sys.exit(EXIT_DOES_NOT_FIT)


def record(plan: RunPlan) -> dict[str, Any]:
    """Returns everything that is printed, as values for JSON."""
    found = asdict(plan)
    del found["places"]["contexts"]
    found["places"] = [asdict(device) for device in plan.places.devices]
    for phase, counted in zip(found["memory"], plan.memory, strict=True):
        phase["known_bytes"] = counted.known_bytes
    if plan.prediction is not None:
        found["prediction"]["step_s"] = plan.prediction.step_s
    return {"schema": SCHEMA, **found, "fits": plan.fits, "is_tight": plan.is_tight}
