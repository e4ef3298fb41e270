"""The tables of a plan, for 80 columns and for more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.table import Table

from rlsdk.planning.contents import PlanContents, PlannedRole
from rlsdk.planning.memory import PhaseMemory
from rlsdk.planning.reshard import LINKS_GB_S

GIB = 1 << 30
WIDE = 110
"""Columns from which one table holds all about a role."""
BAR, SHORT_BAR = 24, 10
"""Cells of a bar of memory."""


def sections(plan: PlanContents, width: int) -> Iterator[Table]:
    """Every table that has something to say, each with its title.

    Args:
        plan: what is shown.
        width: columns of the terminal.
    """
    wide = width >= WIDE
    yield from _roles(plan, wide)
    for table in (_placement(plan), _batches(plan), _reshard(plan), _memory(plan, wide), _times(plan)):
        if table is not None:
            yield table


def _roles(plan: PlanContents, wide: bool) -> Iterator[Table]:
    """One table, or two where that would not fit."""
    what = (("role", ""), ("backend", ""), ("model", ""), ("head", ""), ("dtype", ""), ("lr", "right"))
    where = (("pool", ""), ("ranks", "right"), ("a rank holds", ""))
    if wide:
        table = _table("Roles", *what, *where)
        for role in plan.roles:
            table.add_row(*_role(role), *_held(role))
        yield table
        return
    table, held = _table("Roles", *what), _table("Ranks", ("role", ""), *where)
    for role in plan.roles:
        table.add_row(*_role(role))
        held.add_row(role.name, *_held(role))
    yield from (table, held)


def _role(role: PlannedRole) -> tuple[str, ...]:
    learns = "" if role.lr is None else f"{role.lr:g}"
    return role.name, role.backend, _tail(role.model), role.head, role.dtype, learns


def _held(role: PlannedRole) -> tuple[str, ...]:
    ranks = f"{role.ranks}" + (f" x {role.devices_per_rank}" if role.devices_per_rank > 1 else "")
    held = [
        f"{what} {gib(size)}" if size is not None else f"{what} ?"
        for what, size in (("weights", role.weights_bytes), ("optimizer", role.optimizer_bytes))
        if size != 0
    ]
    return role.pool, ranks, ", ".join(held)


def _tail(path: str) -> str:
    """A model's name, or the last part of its folder."""
    return Path(path).name if path.startswith(("/", ".")) else path


def _placement(plan: PlanContents) -> Table:
    table = _table("Placement", ("node", ""), ("pool", ""), ("devices", "right"), ("roles and their ranks", ""))
    for (node, pool), ranks in _by_node(plan).items():
        table.add_row(f"{node}", pool, f"{len(ranks)}", "  ".join(_spans(ranks)))
    return table


def _by_node(plan: PlanContents) -> dict[tuple[int, str], list[dict[str, int]]]:
    rows: dict[tuple[int, str], list[dict[str, int]]] = {}
    for device in sorted(plan.places.devices, key=lambda device: (device.node, device.pool, device.index)):
        rows.setdefault((device.node, device.pool), []).append(dict(device.ranks))
    return rows


def _spans(ranks: Sequence[dict[str, int]]) -> Iterator[str]:
    for role in dict.fromkeys(name for device in ranks for name in device):
        mine = [device[role] for device in ranks if role in device]
        yield f"{role} {min(mine)}" + (f"-{max(mine)}" if max(mine) > min(mine) else "")


def _batches(plan: PlanContents) -> Table:
    columns = (("batch", ""), ("prompts", "right"), ("samples", "right"), ("most tokens", "right"), ("", ""))
    table = _table("Batch sizes", *columns)
    for size in plan.batches:
        counts = (f"{n:,}" if n is not None else "" for n in (size.prompts, size.samples, size.tokens))
        table.add_row(size.what, *counts, size.note)
    return table


def _reshard(plan: PlanContents) -> Table | None:
    reshard = plan.reshard
    if reshard is None:
        return None
    title = "Weights below the adapter, sent once" if plan.adapter_bytes else "Weights, each sync"
    table = _table(title, ("", ""), ("", "right"), ("", ""))
    if plan.adapter_bytes:
        table.add_row("the adapter alone, each sync", gb(plan.adapter_bytes), "to all targets")
    what = "target" if not reshard.workers else "worker" if reshard.workers == reshard.targets else "place"
    targets = f"{reshard.num_tensors} tensors, {reshard.targets} {what}{'' if reshard.targets == 1 else 's'}"
    table.add_row("to all targets", gb(reshard.num_bytes), targets)
    bound = f"bound {gb(reshard.lower_bound_bytes)}"
    if reshard.lower_bound_bytes:
        bound += f": {reshard.moved_bytes / reshard.lower_bound_bytes:.4f} x"
    if reshard.workers:
        least, most = map(gb, reshard.place_bytes)
        table.add_row(f"to each {what}", most, "" if least == most else f"at least {least}")
    table.add_row("between processes", gb(reshard.moved_bytes), bound)
    if reshard.quantized_tensors:
        held = f"{reshard.quantized_tensors} tensors to float8 where they arrive, each scale of a whole block"
        table.add_row("quantizing, a target", gb(reshard.quantizing_bytes), held)
    if plan.num_nodes > 1:
        table.add_row("between nodes", gb(reshard.between_nodes_bytes), "")
    for name, num_bytes in reshard.by_transport.items():
        table.add_row(f"by {name}", gb(num_bytes), "")
    if reshard.moved_bytes:
        table.add_row("busiest source", gb(reshard.busiest_source_bytes), "")
        if plan.hardware.device != "cpu" and reshard.predicted_s is not None:
            links = "the busiest link kept full: " + ", ".join(f"{n:g} GB/s {where}" for where, n in LINKS_GB_S.items())
            table.add_row("at best", f"{reshard.predicted_s:.2f} s", links)
        received = gb(reshard.receiving_bytes)
        blocks = f"in blocks of at most {reshard.bucket_bytes >> 20} MiB; a target reads {received} of them"
        table.add_row("peak, a source", gb(reshard.sending_bytes), blocks)
    return table


def _memory(plan: PlanContents, wide: bool) -> Table:
    """Where only one place is counted, its name stands in the title."""
    where = "node" if plan.hardware.device == "cpu" else "device"
    places = {phase.place for phase in plan.memory}
    title, columns = f"Memory, the fullest {where}", (("phase", ""), ("GiB", "right"), ("", ""), ("what it is", ""))
    if len(places) > 1:
        table = _table(title, (f"fullest {where}", ""), *columns)
    else:
        table = _table(f"{title}: {', '.join(places)}", *columns)
    size, cells = plan.hardware.device_bytes, BAR if wide else SHORT_BAR
    for phase in plan.memory:
        total = f"{phase.known_bytes / GIB:.2f}" + ("" if phase.is_known else " + ?")
        style = "red" if size is not None and phase.known_bytes > size else ""
        shown = (phase.phase, f"[{style}]{total}[/]" if style else total, _bar(phase, size, cells), _parts(phase))
        table.add_row(*([phase.place] if len(places) > 1 else []), *shown)
    return table


def _bar(phase: PhaseMemory, size: int | None, cells: int) -> str:
    if not size:
        return ""
    share = phase.known_bytes / size
    color = "red" if share > 1 else "yellow" if share > 0.9 else "green"
    full = min(round(share * cells), cells)
    return f"[{color}]{'━' * full}[/][dim]{'─' * (cells - full)}[/] {share:4.0%}"


def _parts(phase: PhaseMemory) -> str:
    parts = sorted(phase.parts, key=lambda part: -(part.num_bytes or 0))
    return ", ".join(
        f"{part.role} {part.what}".strip() + (f" {part.num_bytes / GIB:.2f}" if part.num_bytes is not None else " ?")
        for part in parts
    )


def _times(plan: PlanContents) -> Table | None:
    prediction = plan.prediction
    if prediction is None:
        return None
    table = _table("Seconds of a step, at the rates of the calibrating run", ("phase", ""), ("s", "right"))
    for phase, seconds in prediction.seconds.items():
        table.add_row(phase, f"{seconds:,.2f}")
    table.add_row("[bold]step[/]", f"[bold]{prediction.step_s:,.2f}[/]")
    return table


def _table(title: str, *columns: tuple[str, str]) -> Table:
    table = Table(title=title, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.show_header = any(name for name, _ in columns)
    for at, (name, justify) in enumerate(columns):
        # Only text is broken into lines: short names and numbers are not read in pieces.
        whole = at < len(columns) - 1 and name != "model"
        table.add_column(
            name, justify="right" if justify else "left", header_style="dim", overflow="fold", no_wrap=whole
        )
    return table


def gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.0f} MiB"


def gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"
