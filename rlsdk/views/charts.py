"""Line charts and stacked bars as SVG text: no dependency, readable in any browser, light and dark."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

COLORS = ("#3b76af", "#d1733b", "#519e5c", "#a855a0", "#b8a13a", "#5aa9b5", "#8c6d5a", "#888888")
WIDTH, HEIGHT = 420, 240
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 58, 26
CHAR_WIDTH = 6.0
"""Average width in pixels of a legend's letter."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One curve; points that are not finite are skipped."""

    name: str
    points: Sequence[tuple[float, float]]


def line_chart(title: str, lines: Sequence[Line], *, unit: str = "") -> str:
    """An SVG of curves over the step: axes, ticks, a legend for more than one, a tooltip on each last point."""
    kept = [Line(name=c.name, points=[p for p in c.points if all(map(math.isfinite, p))]) for c in lines]
    points = [point for curve in kept for point in curve.points]
    if not points:
        return ""
    xs, ys = _range([x for x, _ in points]), _range([y for _, y in points])
    body = [_frame(title, xs, ys, unit)]
    for index, curve in enumerate(kept):
        if not curve.points:
            continue
        color = COLORS[index % len(COLORS)]
        path = " ".join(f"{_x(x, xs):.1f},{_y(y, ys):.1f}" for x, y in curve.points)
        body.append(f'<polyline fill="none" stroke="{color}" stroke-width="1.6" points="{path}"/>')
        last_x, last_y = curve.points[-1]
        tip = html.escape(f"{curve.name}: {last_y:.4g}{unit} at step {last_x:.0f}")
        at = f'cx="{_x(last_x, xs):.1f}" cy="{_y(last_y, ys):.1f}"'
        body.append(f'<circle {at} r="3" fill="{color}"><title>{tip}</title></circle>')
    if len(kept) > 1:
        body += _legends([curve.name for curve in kept])
    return _svg("".join(body), title)


def stacked_bars(title: str, rows: Sequence[Mapping[str, float]], *, unit: str = "") -> str:
    """An SVG of one bar per row, split by key: where each step's seconds went."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    top = max((sum(row.values()) for row in rows), default=0.0)
    if top <= 0:
        return ""
    xs, ys = (0.0, float(len(rows))), (0.0, top)
    body = [_frame(title, xs, ys, unit)]
    for at, row in enumerate(rows):
        base = 0.0
        for index, key in enumerate(keys):
            value = row.get(key, 0.0)
            y0, y1 = _y(base, ys), _y(base + value, ys)
            base += value
            tip = html.escape(f"{key}: {value:.3g}{unit}")
            body.append(
                f'<rect x="{_x(at, xs):.1f}" y="{y1:.1f}" width="{max(_x(1, xs) - _x(0, xs) - 0.4, 0.6):.1f}" '
                f'height="{y0 - y1:.1f}" fill="{COLORS[index % len(COLORS)]}"><title>{tip}</title></rect>'
            )
    body += _legends(keys)
    return _svg("".join(body), title)


def sheet(charts: Sequence[str], *, columns: int = 2) -> str:
    """One SVG file with several charts side by side."""
    shown = [chart for chart in charts if chart]
    rows = math.ceil(len(shown) / columns)
    cells = []
    for index, chart in enumerate(shown):
        x, y = index % columns * (WIDTH + 16), index // columns * (HEIGHT + 16)
        cells.append(chart.replace("<svg ", f'<svg x="{x}" y="{y}" ', 1))
    width, height = columns * (WIDTH + 16), rows * (HEIGHT + 16)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f'<rect width="100%" height="100%" fill="#ffffff"/>{"".join(cells)}</svg>'
    )


def _svg(body: str, title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="img" aria-label="{html.escape(title)}" font-family="system-ui, sans-serif" font-size="11" '
        f'fill="#777777">{body}</svg>'
    )


def _frame(title: str, xs: tuple[float, float], ys: tuple[float, float], unit: str) -> str:
    parts = [f'<text x="{LEFT}" y="16" font-size="13" font-weight="600">{html.escape(title)}</text>']
    for value in _ticks(*ys):
        y = _y(value, ys)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#8884"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}{unit}</text>')
    for value in _ticks(*xs):
        parts.append(f'<text x="{_x(value, xs):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{value:.4g}</text>')
    return "".join(parts)


def _legends(names: Sequence[str]) -> Iterator[str]:
    """Legend: a coloured square and a name for each curve, wrapped to as many lines as needed."""
    x, y = LEFT, 34
    for index, name in enumerate(names):
        width = 26 + math.ceil(CHAR_WIDTH * len(name))
        if x > LEFT and x + width > WIDTH - RIGHT:
            x, y = LEFT, y + 14
        yield (
            f'<rect x="{x}" y="{y - 8}" width="9" height="9" fill="{COLORS[index % len(COLORS)]}"/>'
            f'<text x="{x + 13}" y="{y}">{html.escape(name)}</text>'
        )
        x += width


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers inside the range."""
    raw = (high - low) / count
    magnitude = 10 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= raw)
    first = math.ceil(low / step) * step
    return [first + i * step for i in range(int((high - first) / step + 1e-9) + 1)]


def _x(value: float, within: tuple[float, float]) -> float:
    return LEFT + (value - within[0]) / (within[1] - within[0]) * (WIDTH - LEFT - RIGHT)


def _y(value: float, within: tuple[float, float]) -> float:
    return HEIGHT - BOTTOM - (value - within[0]) / (within[1] - within[0]) * (HEIGHT - TOP - BOTTOM)
