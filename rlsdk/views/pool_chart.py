"""Timeline of a run's two pools as one SVG: the step that each worked on, idle times, and weight transfers."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from rlsdk.trainer.tracking.pool_times import Moment
from rlsdk.views.charts import COLORS

WIDTH, HEIGHT, LEFT, RIGHT = 860, 216, 84, 12
TRAIN_TOP, TRAIN_HEIGHT = 30, 40
ROLLOUT_TOP, ROLLOUT_HEIGHT = 88, 92
HUES = COLORS[:7]
WEIGHTS = "#8888"
TICKS = 8
LABEL_WIDTH = 18
"""Least width of a block in pixels to be labelled with its step."""
Span = tuple[float, float, int]
"""From, to, step."""


def pools_chart(moments: Sequence[Moment]) -> str:
    """The SVG; empty if no step was trained."""
    trained = list(spans(moments, "train", "trained"))
    if not trained:
        return ""
    first, last = moments[0].at, max(moments[-1].at, moments[0].at + 1e-3)
    across = _Across(first, last)
    published = list(spans(moments, "publish", "served"))
    counts = list(levels(moments))
    body = [
        _label(14, LEFT, _shares(trained, published, counts, first, last)),
        *_lane("training", TRAIN_TOP, TRAIN_HEIGHT),
        *_lane("rollout", ROLLOUT_TOP, ROLLOUT_HEIGHT),
        *(_block(across, span) for span in trained),
        *(
            _shade(across, span, TRAIN_TOP, TRAIN_HEIGHT, "copy of the weights")
            for span in spans(moments, "hold", "held")
        ),
        *_areas(across, counts),
        *(_shade(across, span, ROLLOUT_TOP, ROLLOUT_HEIGHT, "weights on their way") for span in published),
        *_axis(across),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'role="img" aria-label="Pools over time" font-family="system-ui, sans-serif" font-size="11" fill="#777777">'
        f"{''.join(body)}</svg>"
    )


class _Across:
    """Seconds to pixels."""

    def __init__(self, first: float, last: float) -> None:
        self.first, self.passed = first, last - first

    def __call__(self, at: float) -> float:
        return LEFT + (at - self.first) / self.passed * (WIDTH - LEFT - RIGHT)


def spans(moments: Sequence[Moment], begin: str, end: str) -> Iterator[Span]:
    """Spans from each moment of kind `begin` to the next one of kind `end` of the same step."""
    open_since: dict[int, float] = {}
    for moment in moments:
        if moment.kind == begin:
            open_since[moment.step] = moment.at
        elif moment.kind == end and moment.step in open_since:
            yield open_since.pop(moment.step), moment.at, moment.step


def levels(moments: Sequence[Moment]) -> Iterator[tuple[float, Mapping[int, int]]]:
    """Running groups by step, after each moment that changes them. Groups that began before the first moment are
    assumed to have run since then."""
    count: dict[int, int] = {}
    low: dict[int, int] = {}
    changes = [moment for moment in moments if moment.kind in ("start", "made")]
    for moment in changes:
        count[moment.step] = count.get(moment.step, 0) + (moment.count if moment.kind == "start" else -moment.count)
        low[moment.step] = min(low.get(moment.step, 0), count[moment.step])
    running = {step: -least for step, least in low.items() if least < 0}
    yield moments[0].at, dict(running)
    for moment in changes:
        added = moment.count if moment.kind == "start" else -moment.count
        running[moment.step] = running.get(moment.step, 0) + added
        if not running[moment.step]:
            del running[moment.step]
        yield moment.at, dict(running)
    yield moments[-1].at, dict(running)


def _shares(
    trained: Sequence[Span],
    published: Sequence[Span],
    levels: Sequence[tuple[float, Mapping[int, int]]],
    first: float,
    last: float,
) -> str:
    passed = last - first
    training = sum(end - begin for begin, end, _ in trained) / passed
    making = sum(after - at for (at, running), (after, _) in pairwise(levels) if running) / passed
    moving = sum(end - begin for begin, end, _ in published) / passed
    return f"training works {training:.0%} of the time, groups are under way {making:.0%}, weights {moving:.0%}"


def _lane(name: str, top: float, height: float) -> Iterator[str]:
    yield f'<text x="{LEFT - 10}" y="{top + height / 2 + 4:.0f}" text-anchor="end" font-size="12">{name}</text>'
    yield f'<rect x="{LEFT}" y="{top}" width="{WIDTH - LEFT - RIGHT}" height="{height}" fill="#8881"/>'


def _block(across: _Across, span: Span) -> str:
    begin, end, step = span
    x, width = across(begin), max(across(end) - across(begin), 0.6)
    box = (
        f'<rect x="{x:.1f}" y="{TRAIN_TOP}" width="{width:.1f}" height="{TRAIN_HEIGHT}" rx="2" fill="{_hue(step)}">'
        f"<title>step {step}: {end - begin:.2f} s of training</title></rect>"
    )
    if width < LABEL_WIDTH:
        return box
    return box + (
        f'<text x="{x + width / 2:.1f}" y="{TRAIN_TOP + TRAIN_HEIGHT / 2 + 4:.0f}" text-anchor="middle" '
        f'fill="#ffffff">{step}</text>'
    )


def _shade(across: _Across, span: Span, top: float, height: float, what: str) -> str:
    begin, end, step = span
    width = max(across(end) - across(begin), 1.0)
    return (
        f'<rect x="{across(begin):.1f}" y="{top}" width="{width:.1f}" height="{height}" fill="{WEIGHTS}">'
        f"<title>{html.escape(what)}, behind step {step}: {end - begin:.3f} s</title></rect>"
    )


def _areas(across: _Across, levels: Sequence[tuple[float, Mapping[int, int]]]) -> Iterator[str]:
    """Stacked areas of running groups, older steps below: one outline per step, with a corner at each change."""
    most = max((sum(running.values()) for _, running in levels), default=0)
    if not most:
        return
    bottom, scale = ROLLOUT_TOP + ROLLOUT_HEIGHT, ROLLOUT_HEIGHT / most
    for step in sorted({step for _, running in levels for step in running}):
        upper, lower = [], []
        for (at, running), (after, _) in pairwise(levels):
            base = sum(count for other, count in running.items() if other < step)
            high, low = bottom - scale * (base + running.get(step, 0)), bottom - scale * base
            upper += [f"{across(at):.1f},{high:.1f}", f"{across(after):.1f},{high:.1f}"]
            lower += [f"{across(at):.1f},{low:.1f}", f"{across(after):.1f},{low:.1f}"]
        yield (
            f'<polygon points="{" ".join([*upper, *reversed(lower)])}" fill="{_hue(step)}" fill-opacity="0.85">'
            f"<title>groups for step {step}</title></polygon>"
        )
    yield _label(ROLLOUT_TOP + 10, LEFT - 10, f"{most} groups", anchor="end", size=9)


def _axis(across: _Across) -> Iterator[str]:
    raw = across.passed / TICKS
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= raw)
    for at in (count * step for count in range(int(across.passed / step) + 1)):
        x = across(across.first + at)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TRAIN_TOP}" y2="{ROLLOUT_TOP + ROLLOUT_HEIGHT}" stroke="#8883"/>'
        yield f'<text x="{x:.1f}" y="{HEIGHT - 14}" text-anchor="middle">{at:.6g} s</text>'


def _label(y: float, x: float, text: str, *, size: int = 11, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _hue(step: int) -> str:
    return HUES[step % len(HUES)]
