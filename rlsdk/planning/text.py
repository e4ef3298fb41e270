"""A plan as text: its tables, and whether it fits."""

from __future__ import annotations

import html
import io
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Column
from rich.text import Text

from rlsdk.interfaces.spelling import Setting, spell
from rlsdk.planning.contents import PlanContents
from rlsdk.planning.tables import gib, sections
from rlsdk.system.printable import printable

TEXT_WIDTH = 110
"""Columns of a plan that is printed from Python."""
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


def text_of(plan: PlanContents) -> str:
    """The plan as plain text, without colours."""
    written = io.StringIO()
    # A notebook would show what rich prints, wherever it is printed to.
    show(plan, Console(file=written, width=TEXT_WIDTH, highlight=False, color_system=None, force_jupyter=False))
    return printable(written.getvalue())


def show(plan: PlanContents, console: Console) -> None:
    """Prints section after section, the verdict last."""
    console.print(_title(plan))
    for section in sections(plan, console.width):
        title, section.title = section.title, None  # rich would fold it to the width of the table
        console.print(f"\n[bold]{title}[/]")
        console.print(section)
    console.print()
    for line in _verdict(plan):
        console.print(line, soft_wrap=not console.is_terminal)


def html_of(plan: PlanContents) -> str:
    """The same as `text_of`, with tables of HTML; nothing in it is run or loaded."""
    parts = [f"<p>{'<br>'.join(map(_html, _title(plan).splitlines()))}</p>"]
    for section in sections(plan, TEXT_WIDTH):
        columns = section.columns
        head = "".join(f"<th>{_html(column.header)}</th>" for column in columns)
        rows = zip(*(column.cells for column in columns), strict=True)
        body = "".join(f"<tr>{''.join(map(_cell, row, columns))}</tr>" for row in rows)
        parts.append(f"<h4>{_html(section.title)}</h4><table><tr>{head}</tr>{body}</table>")
    return "".join([*parts, f"<p>{'<br>'.join(map(_html, _verdict(plan)))}</p>"])


def _cell(content: object, column: Column) -> str:
    return f'<td style="text-align: {column.justify}">{_html(content)}</td>'


def _html(content: object) -> str:
    """What rich would print as text; bold is kept."""
    text = content if isinstance(content, Text) else Text.from_markup(str(content or ""))
    said = html.escape(printable(text.plain))
    is_bold = any("bold" in str(span.style) and span.start == 0 for span in text.spans)
    return f"<b>{said}</b>" if is_bold else said


def _title(plan: PlanContents) -> str:
    hardware = plan.hardware
    size = "memory unknown" if hardware.device_bytes is None else f"{gib(hardware.device_bytes)} each"
    what = "nodes" if hardware.device == "cpu" else "devices"
    model = f"{plan.reshard.num_parameters / 1e6:,.1f} M parameters" if plan.reshard else "size of the model unknown"
    return f"[bold]{model}[/]\n{plan.num_nodes} x {plan.devices_per_node} devices of {hardware.name}, {what} of {size}"


def _verdict(plan: PlanContents) -> Iterator[str]:
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
        if plan.change:
            yield f"fits with: {escape(spell(*(Setting(path, value) for path, value in plan.change.items())))}"
        elif plan.change is not None:
            yield "no number of devices of this hardware helps, with recomputed activations and state in main memory"
    elif plan.fits is None:
        yield "[yellow]whether it fits is unknown[/]: what is known fits"
    else:
        share = peak.known_bytes / size
        tight = ", with little to spare" if plan.is_tight else ""
        yield f"[bold green]fits[/]{tight}: at most {share:.0%} of {gib(size)}, in phase {peak.phase} on {peak.place}"
