"""`rlsdk plan`: what `rlsdk train` with the same arguments would be, without taking a device."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rlsdk.api.machine import run_plan
from rlsdk.api.settings import Settings
from rlsdk.planning import RunPlan
from rlsdk.planning.memory import PhaseMemory
from rlsdk.planning.reshard import LINKS_GB_S
from rlsdk.views.terminal import SafeConsole

EXIT_DOES_NOT_FIT = 1
SCHEMA = 2
"""Of `--json`: goes up when a field goes, or changes its meaning."""
GIB = 1 << 30
BAR = 24
"""Cells of a bar of memory."""
HINTS = {
    "activations": "train.activation_checkpointing true, or a smaller train.micro_batch_tokens",
    "optimizer": "more devices for the actor, with a train backend that shards",
    "weights": "more devices, with backends that shard, rollout.tp_size, or model.dtype bfloat16",
    "gradients": "more devices for the actor, with a train backend that shards",
    "keys, values": "a smaller rollout.max_running_samples or rollout.max_response_tokens, or more replicas",
    "decoding": "a smaller rollout.max_running_samples",
    "buckets": "a smaller sharding.bucket_mb",
    "processes": "fewer ranks on a node",
}


def run(args: Sequence[str], *, hardware: str | None, calibration: Path | None, as_json: bool) -> None:
    """Prints the plan; leaves with code 1 where the run does not fit."""
    plan = run_plan(Settings(flags=args), hardware=hardware, calibration=calibration)
    if as_json:
        print(json.dumps(record(plan), indent=2))
    else:
        console: Console = SafeConsole(file=sys.stdout, highlight=False)
        if not console.is_terminal:
            console = SafeConsole(file=sys.stdout, highlight=False, width=120)
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
    for section in (_roles(plan), _placement(plan), _batches(plan), _reshard(plan), _memory(plan), _times(plan)):
        if section is not None:
            title, section.title = section.title, None  # rich would fold it to the width of the table
            console.print(f"\n[bold]{title}[/]")
            console.print(section)
    console.print()
    for line in _verdict(plan):
        console.print(line, soft_wrap=True)


def _title(plan: RunPlan) -> str:
    hardware = plan.hardware
    size = "memory unknown" if hardware.device_bytes is None else f"{gib(hardware.device_bytes)} each"
    what = "nodes" if hardware.device == "cpu" else "devices"
    model = f"{plan.reshard.num_parameters / 1e6:,.1f} M parameters" if plan.reshard else "size of the model unknown"
    return f"[bold]{model}[/]\n{plan.num_nodes} x {plan.devices_per_node} devices of {hardware.name}, {what} of {size}"


def _roles(plan: RunPlan) -> Table:
    columns = (("role", ""), ("backend", ""), ("model", ""), ("head", ""), ("dtype", ""), ("learning rate", "right"))
    table = _table("Roles", *columns, ("pool", ""), ("ranks", "right"), ("a rank holds", ""))
    for role in plan.roles:
        ranks = f"{role.ranks}" + (f" x {role.devices_per_rank}" if role.devices_per_rank > 1 else "")
        held = [
            f"{what} {gib(size)}" if size is not None else f"{what} ?"
            for what, size in (("weights", role.weights_bytes), ("optimizer", role.optimizer_bytes))
            if size != 0
        ]
        learns = "" if role.lr is None else f"{role.lr:g}"
        table.add_row(
            role.name, role.backend, _tail(role.model), role.head, role.dtype, learns, role.pool, ranks, ", ".join(held)
        )
    return table


def _tail(path: str) -> str:
    """A model's name, or the last part of its folder."""
    return Path(path).name if path.startswith(("/", ".")) else path


def _placement(plan: RunPlan) -> Table:
    table = _table("Placement", ("node", ""), ("pool", ""), ("devices", "right"), ("roles and their ranks", ""))
    for (node, pool), ranks in _by_node(plan).items():
        table.add_row(f"{node}", pool, f"{len(ranks)}", "  ".join(_spans(ranks)))
    return table


def _by_node(plan: RunPlan) -> dict[tuple[int, str], list[dict[str, int]]]:
    found: dict[tuple[int, str], list[dict[str, int]]] = {}
    for device in sorted(plan.places.devices, key=lambda device: (device.node, device.pool, device.index)):
        found.setdefault((device.node, device.pool), []).append(dict(device.ranks))
    return found


def _spans(ranks: Sequence[dict[str, int]]) -> Iterator[str]:
    for role in dict.fromkeys(name for device in ranks for name in device):
        mine = [device[role] for device in ranks if role in device]
        yield f"{role} {min(mine)}" + (f"-{max(mine)}" if max(mine) > min(mine) else "")


def _batches(plan: RunPlan) -> Table:
    columns = (("batch", ""), ("prompts", "right"), ("samples", "right"), ("tokens at most", "right"), ("", ""))
    table = _table("Batch sizes", *columns)
    for size in plan.batches:
        counts = (f"{n:,}" if n is not None else "" for n in (size.prompts, size.samples, size.tokens))
        table.add_row(size.what, *counts, size.note)
    return table


def _reshard(plan: RunPlan) -> Table | None:
    found = plan.reshard
    if found is None:
        return None
    table = _table("Weights, each sync", ("", ""), ("", "right"), ("", ""))
    what = "target" if not found.workers else "worker" if found.workers == found.targets else "place"
    targets = f"{found.num_tensors} tensors, {found.targets} {what}{'' if found.targets == 1 else 's'}"
    table.add_row("to all targets", gb(found.num_bytes), targets)
    bound = f"bound {gb(found.lower_bound_bytes)}"
    if found.lower_bound_bytes:
        bound += f": {found.moved_bytes / found.lower_bound_bytes:.4f} x"
    if found.workers:
        least, most = map(gb, found.place_bytes)
        table.add_row(f"to each {what}", most, "" if least == most else f"at least {least}")
    table.add_row("between processes", gb(found.moved_bytes), bound)
    if found.quantized_tensors:
        held = f"{found.quantized_tensors} tensors to float8 where they arrive, each scale of a whole block"
        table.add_row("quantizing, a target", gb(found.quantizing_bytes), held)
    if plan.num_nodes > 1:
        table.add_row("between nodes", gb(found.between_nodes_bytes), "")
    for name, num_bytes in found.by_transport.items():
        table.add_row(f"by {name}", gb(num_bytes), "")
    if found.moved_bytes:
        table.add_row("busiest source", gb(found.busiest_source_bytes), "")
        if plan.hardware.device != "cpu" and found.predicted_s is not None:
            links = "the busiest link kept full: " + ", ".join(f"{n:g} GB/s {where}" for where, n in LINKS_GB_S.items())
            table.add_row("at best", f"{found.predicted_s:.2f} s", links)
        blocks = (
            f"in blocks of at most {found.bucket_bytes >> 20} MiB; a target reads {gb(found.receiving_bytes)} of them"
        )
        table.add_row("peak, a source", gb(found.sending_bytes), blocks)
    return table


def _memory(plan: RunPlan) -> Table:
    where = "node" if plan.hardware.device == "cpu" else "device"
    columns = ((f"fullest {where}", ""), ("phase", ""), ("GiB", "right"), ("", ""), ("what it is", ""))
    table = _table(f"Memory, the fullest {where}", *columns)
    size = plan.hardware.device_bytes
    for phase in plan.memory:
        total = f"{phase.known_bytes / GIB:.2f}" + ("" if phase.is_known else " + ?")
        style = "red" if size is not None and phase.known_bytes > size else ""
        table.add_row(
            phase.place, phase.phase, f"[{style}]{total}[/]" if style else total, _bar(phase, size), _parts(phase)
        )
    return table


def _bar(phase: PhaseMemory, size: int | None) -> str:
    if not size:
        return ""
    share = phase.known_bytes / size
    color = "red" if share > 1 else "yellow" if share > 0.9 else "green"
    full = min(round(share * BAR), BAR)
    return f"[{color}]{'━' * full}[/][dim]{'─' * (BAR - full)}[/] {share:4.0%}"


def _parts(phase: PhaseMemory) -> str:
    parts = sorted(phase.parts, key=lambda part: -(part.num_bytes or 0))
    return ", ".join(
        f"{part.role} {part.what}".strip() + (f" {part.num_bytes / GIB:.2f}" if part.num_bytes is not None else " ?")
        for part in parts
    )


def _times(plan: RunPlan) -> Table | None:
    found = plan.prediction
    if found is None:
        return None
    table = _table("Seconds of a step, at the rates of the calibrating run", ("phase", ""), ("s", "right"))
    for phase, seconds in found.seconds.items():
        table.add_row(phase, f"{seconds:,.2f}")
    table.add_row("[bold]step[/]", f"[bold]{found.step_s:,.2f}[/]")
    return table


def _verdict(plan: RunPlan) -> Iterator[str]:
    if plan.prediction is not None and plan.prediction.notes:
        yield "[yellow]times are far-fetched[/]: " + "; ".join(plan.prediction.notes)
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
        yield f"largest: {largest.role} {largest.what}".rstrip() + f"; lower it by {HINTS[largest.what]}"
    elif plan.fits is None:
        yield "[yellow]whether it fits is unknown[/]: what is known fits"
    else:
        share = peak.known_bytes / size
        tight = ", with little to spare" if plan.is_tight else ""
        yield f"[bold green]fits[/]{tight}: at most {share:.0%} of {gib(size)}, in phase {peak.phase} on {peak.place}"


def _table(title: str, *columns: tuple[str, str]) -> Table:
    table = Table(title=title, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.show_header = any(name for name, _ in columns)
    for name, justify in columns:
        table.add_column(name, justify="right" if justify else "left", header_style="dim", overflow="fold")
    return table


def gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.0f} MiB"


def gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"
