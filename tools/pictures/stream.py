"""The stream of groups over time: what the real schedule commands, in the time of the simulator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rlsdk.planning.rates import Rates, Setting
from rlsdk.planning.simulation import Simulation

from .svg import COLORS, SHADE, box, line, picture, text

GROUPS, STEPS = 4, 6
LENGTHS = (52, 34, 96, 40, 78, 30, 56, 88, 44, 62, 90, 36, 58, 48, 70, 82, 38, 66, 54, 92)
"""Tokens of each group; a few are much longer than the others."""
RATES = Rates(decode_s=0.02, train_tokens_per_s=200.0, sync_s=0.12, max_running=2 * GROUPS)
WIDTH, LEFT, ROW, GAP = 860, 78, 17, 4
TITLES = {
    0: "max_staleness 0: the pools take turns; a step trains on samples of its own weights",
    1: "max_staleness 1: groups of the next step are made while a step trains",
}


@dataclass(frozen=True)
class Bar:
    """Something that took time, for a step."""

    name: str
    step: int
    begin: float
    end: float
    version: int = 0
    """Step of the weights that a group began with."""


class Recorded(Simulation):
    """A simulation that remembers when everything began and ended."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting, RATES, LENGTHS, steps=STEPS)
        self.begun: dict[int, tuple[float, int]] = {}
        self.made: dict[int, tuple[float, float, int]] = {}
        self.groups: dict[int, Bar] = {}
        self.updates: list[Bar] = []
        self.served_at: dict[int, float] = {}

    def start(self, groups: Sequence[int]) -> None:
        self.begun |= dict.fromkeys(groups, (self.now, self.served))
        super().start(groups)

    def graded(self, group: int) -> None:
        begin, version = self.begun[group]
        self.made[group] = (begin, self.now, version)
        super().graded(group)

    def train(self, step: int, groups: Sequence[int]) -> None:
        super().train(step, groups)
        seconds = 0.0 if self.training is None else self.training.left_s
        self.updates.append(Bar(f"step {step}", step, self.now, self.now + seconds))
        for group in groups:
            begin, end, version = self.made[group]
            self.groups[group] = Bar(f"{group}", step, begin, end, version)

    def resume(self, step: int) -> None:
        self.served_at[step] = self.now
        super().resume(step)


def record(max_staleness: int) -> Recorded:
    """Runs the schedule to its last step."""
    found = Recorded(
        Setting(
            train_devices=1,
            rollout_devices=1,
            groups_per_step=GROUPS,
            samples_per_group=1,
            max_staleness=max_staleness,
        )
    )
    found.run()
    return found


def stream_picture() -> str:
    """Both schedules under each other, on one scale of time."""
    runs = {staleness: record(staleness) for staleness in TITLES}
    last = max(run.updates[-1].end for run in runs.values())
    scale = (WIDTH - LEFT - 14) / last
    body: list[str] = []
    top = 8.0
    for staleness, run in runs.items():
        part, height = _panel(run, TITLES[staleness], top, scale)
        body += part
        top += height + 18
    body.append(text(LEFT, top + 2, "time; numbers on bars count the groups; a colour is the step that trains them"))
    return picture(WIDTH, top + 14, "The stream of groups under two schedules", body)


def _panel(run: Recorded, title: str, top: float, scale: float) -> tuple[list[str], float]:
    lanes = list(_lanes(run.groups.values()))
    rollout_top = top + 24
    height = (max(lane for _, lane in lanes) + 1) * (ROW + GAP)
    train_top = rollout_top + height + 8
    body = [
        text(LEFT, top + 12, title, bold=True, size=13),
        text(LEFT - 8, rollout_top + height / 2 + 4, "rollout", anchor="end"),
        text(LEFT - 8, train_top + 17, "training", anchor="end"),
        box(LEFT, rollout_top - 4, WIDTH - LEFT - 14, height + 4, SHADE),
        box(LEFT, train_top, WIDTH - LEFT - 14, 26, SHADE),
    ]
    for step, at in run.served_at.items():
        body.append(line(LEFT + at * scale, rollout_top - 4, LEFT + at * scale, train_top + 26, dashed=True))
        body.append(text(LEFT + at * scale + 2, train_top + 38, f"weights {step}", size=10))
    for bar, lane in lanes:
        tip = f"group {bar.name}: begun with weights {bar.version}, trained in step {bar.step}"
        body += _bar(bar, rollout_top + lane * (ROW + GAP), ROW, scale, tip)
    for bar in run.updates:
        body += _bar(bar, train_top + 2, 22, scale, f"training of {bar.name}")
    return body, train_top + 44 - top


def _bar(bar: Bar, y: float, height: float, scale: float, tip: str) -> Iterator[str]:
    x, width = LEFT + bar.begin * scale, max((bar.end - bar.begin) * scale - 1, 2)
    yield box(x, y, width, height, COLORS[bar.step % len(COLORS)], tip=tip)
    label = bar.name if width > 45 or bar.name.isdecimal() else bar.name.removeprefix("step ")
    yield text(x + width / 2, y + height / 2 + 4, label, size=11, anchor="middle", fill="#ffffff")


def _lanes(bars: Iterable[Bar]) -> Iterator[tuple[Bar, int]]:
    """Each bar with the first lane that is free when it begins."""
    free: list[float] = []
    for bar in sorted(bars, key=lambda bar: (bar.begin, bar.end)):
        lane = next((at for at, end in enumerate(free) if end <= bar.begin + 1e-9), len(free))
        free[lane : lane + 1] = [bar.end]
        yield bar, lane
