"""`rlsdk plan`: what `rlsdk train` with the same arguments would be, without taking a device."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from rlsdk.api.machine import run_plan
from rlsdk.api.settings import Settings
from rlsdk.cli.plan_tables import gib, sections
from rlsdk.planning import RunPlan
from rlsdk.views.terminal import SafeConsole

EXIT_DOES_NOT_FIT = 1
SCHEMA = 2
"""Of `--json`: goes up when a field goes, or changes its meaning."""
HINTS = {
    "activations": "train.activation_checkpointing true, or a smaller train.micro_batch_tokens",
    "optimizer": "more devices for the actor, with a train backend that shards",
    "weights": "more devices, with backends that shard, rollout.tp_size, or model.dtype bfloat16",
    "gradients": "more devices for the actor, with a train backend that shards",
    "keys, values": "a smaller rollout.max_running_samples or rollout.max_response_tokens, or more replicas",
    "decoding": "a smaller rollout.max_running_samples",
    "buckets": "a smaller sharding.bucket_mb",
    "processes": "fewer ranks on a node, or a machine with more memory",
}


def run(args: Sequence[str], *, hardware: str | None, calibration: Path | None, as_json: bool) -> None:
    """Prints the plan; leaves with code 1 where the run does not fit."""
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
    """Everything that is printed, as JSON takes it."""
    found = asdict(plan)
    del found["places"]["contexts"]
    found["places"] = [asdict(device) for device in plan.places.devices]
    for phase, counted in zip(found["memory"], plan.memory, strict=True):
        phase["known_bytes"] = counted.known_bytes
    if plan.prediction is not None:
        found["prediction"]["step_s"] = plan.prediction.step_s
    return {"schema": SCHEMA, **found, "fits": plan.fits, "is_tight": plan.is_tight}


def show(plan: RunPlan, console: Console) -> None:
    """Section after section, the verdict last."""
    console.print(_title(plan))
    for section in sections(plan, console.width):
        title, section.title = section.title, None  # rich would fold it to the width of the table
        console.print(f"\n[bold]{title}[/]")
        console.print(section)
    console.print()
    for line in _verdict(plan):
        console.print(line, soft_wrap=not console.is_terminal)


def _title(plan: RunPlan) -> str:
    hardware = plan.hardware
    size = "memory unknown" if hardware.device_bytes is None else f"{gib(hardware.device_bytes)} each"
    what = "nodes" if hardware.device == "cpu" else "devices"
    model = f"{plan.reshard.num_parameters / 1e6:,.1f} M parameters" if plan.reshard else "size of the model unknown"
    return f"[bold]{model}[/]\n{plan.num_nodes} x {plan.devices_per_node} devices of {hardware.name}, {what} of {size}"


def _verdict(plan: RunPlan) -> Iterator[str]:
    if plan.prediction is not None and plan.prediction.notes:
        yield "[yellow]times are far-fetched[/]: " + "; ".join(plan.prediction.notes)
    for line in plan.notices:
        yield f"[yellow]note[/]: {escape(line.removeprefix('warning: '))}"
    for line in plan.unknown:
        yield f"[yellow]unknown[/]: {line}"
    if plan.host_bytes:
        yield f"main memory: {gib(plan.host_bytes)} on the fullest node for what leaves the devices, and for blocks"
    size, peak = plan.hardware.device_bytes, plan.peak
    if size is None:
        yield "[yellow]whether it fits is unknown[/]: name the hardware: --hardware h100, or --hardware 80GiB"
    elif plan.fits is False:
        over = peak.known_bytes - size
        yield f"[bold red]does not fit[/]: phase {peak.phase} on {peak.place} is {gib(over)} over {gib(size)}"
        largest = max(peak.parts, key=lambda part: part.num_bytes or 0)
        what = f"{largest.role} {largest.what}".strip()
        yield f"largest: {what}; lower it by {HINTS[largest.what]}"
    elif plan.fits is None:
        yield "[yellow]whether it fits is unknown[/]: what is known fits"
    else:
        share = peak.known_bytes / size
        tight = ", with little to spare" if plan.is_tight else ""
        yield f"[bold green]fits[/]{tight}: at most {share:.0%} of {gib(size)}, in phase {peak.phase} on {peak.place}"
