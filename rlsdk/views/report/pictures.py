"""Pictures of a report besides its curves. To add one, write a function in its own file and list it here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlsdk.trainer.tracking.pool_times import FILE, read_times
from rlsdk.views.pool_chart import pools_chart
from rlsdk.views.report.markup import escaped
from rlsdk.views.report.record import RunRecord
from rlsdk.views.staleness_chart import staleness_bars


@dataclass(frozen=True, kw_only=True)
class Picture:
    """An SVG with its heading."""

    title: str
    svg: str
    """Every text in it escaped; colours as attributes, since the page's policy allows no `style` attribute."""
    note: str = ""


STEPS = 16
"""Number of newest steps whose timeline is shown."""


def pools(record: RunRecord) -> Picture | None:
    """Timeline of both pools; None if it was not recorded."""
    svg = pools_chart(read_times(record.folder / FILE, last_steps=STEPS))
    note = (
        f"The last {STEPS} steps at most. A colour is a step: its groups while they are made, then its training. Grey: "
        "weights are under way to the replicas."
    )
    return Picture(title="Pools over time", svg=svg, note=note) if svg else None


def ages(record: RunRecord) -> Picture | None:
    """Ages of the tokens of each step; None if none could be stale."""
    svg = staleness_bars(record.metrics)
    note = "Trainer steps between the weights that sampled a token and those that were updated on it."
    return Picture(title="Age of tokens", svg=svg, note=note) if svg else None


PICTURES: tuple[Callable[[RunRecord], Picture | None], ...] = (pools, ages)
"""Functions that return a picture, or None if the run has no data for it."""


def pictures_of(record: RunRecord) -> str:
    """The section of all pictures; empty without any."""
    found = [picture for draw in PICTURES if (picture := draw(record)) is not None]
    return "".join(
        f'<h2>{escaped(one.title)}</h2><p class="quiet">{escaped(one.note)}</p><div class="picture">{one.svg}</div>'
        for one in found
    )
