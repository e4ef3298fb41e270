"""A few shapes as SVG text. Colours are readable on a light and on a dark page."""

from __future__ import annotations

import html
from collections.abc import Iterable

COLORS = ("#3b76af", "#c8662b", "#438a4e", "#9a4b95", "#94801f", "#3f8f9c", "#7b5d4b")
"""Dark enough for white text."""
INK, QUIET, LINE, SHADE = "#777777", "#888888", "#8886", "#8882"


def picture(width: float, height: float, title: str, body: Iterable[str]) -> str:
    """A whole file."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img" aria-label="{html.escape(title)}" font-family="system-ui, sans-serif" '
        f'font-size="12" fill="{INK}">\n' + "\n".join(body) + "\n</svg>\n"
    )


def box(x: float, y: float, width: float, height: float, fill: str, *, tip: str = "", radius: float = 3) -> str:
    inside = f"<title>{html.escape(tip)}</title>" if tip else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius:g}" fill="{fill}">'
        f"{inside}</rect>"
    )


def frame(x: float, y: float, width: float, height: float) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="4" fill="{SHADE}" '
        f'stroke="{LINE}"/>'
    )


def text(
    x: float, y: float, words: str, *, size: int = 12, bold: bool = False, anchor: str = "start", fill: str = INK
) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{fill}"{weight}>'
        f"{html.escape(words)}</text>"
    )


def line(x0: float, y0: float, x1: float, y1: float, *, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="3 3"' if dashed else ""
    return f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="{QUIET}"{dash}/>'


def ribbon(x0: float, y0: float, x1: float, y1: float, width: float, color: str, tip: str) -> str:
    """A band of this width from one point to another, level at both ends."""
    middle = (x0 + x1) / 2
    path = f"M{x0:.1f},{y0:.1f} C{middle:.1f},{y0:.1f} {middle:.1f},{y1:.1f} {x1:.1f},{y1:.1f}"
    return (
        f'<path d="{path}" fill="none" stroke="{color}" stroke-opacity="0.55" stroke-width="{width:.1f}">'
        f"<title>{html.escape(tip)}</title></path>"
    )
