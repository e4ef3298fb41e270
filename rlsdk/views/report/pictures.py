"""Pictures of a run besides its curves. A further one is a function in a file of its own, named here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlsdk.views.report.markup import escaped
from rlsdk.views.report.record import RunRecord


@dataclass(frozen=True, kw_only=True)
class Picture:
    """An SVG with its heading."""

    title: str
    svg: str
    """Every text in it escaped; colours as attributes, since the page's policy allows no `style` attribute."""
    note: str = ""


PICTURES: tuple[Callable[[RunRecord], Picture | None], ...] = ()
"""Each gives a picture, or None where the run has nothing for it."""


def pictures_of(record: RunRecord) -> str:
    """The section of all pictures; empty without any."""
    found = [picture for draw in PICTURES if (picture := draw(record)) is not None]
    return "".join(
        f'<h2>{escaped(one.title)}</h2><p class="quiet">{escaped(one.note)}</p><div class="picture">{one.svg}</div>'
        for one in found
    )
