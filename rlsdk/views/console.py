"""Shows a run in a terminal, or in a file."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from rlsdk.interfaces import SyncReport
from rlsdk.system.printable import printable
from rlsdk.trainer.tracking.events import RunView
from rlsdk.views.figures import eval_lines
from rlsdk.views.summary import Totals
from rlsdk.views.terminal import SafeConsole

COLUMNS = (
    ("reward", "reward/mean", "{:7.3f}", 1.0),
    ("acc", "reward/accuracy", "{:5.1f}%", 100.0),
    ("tokens", "response/tokens_mean", "{:6.1f}", 1.0),
    ("KL", "policy/approx_kl", "{:7.4f}", 1.0),
    ("|dlogp|", "parity/log_prob_diff_mean", "{:7.1e}", 1.0),
    ("grad", "policy/grad_norm", "{:6.2f}", 1.0),
    ("step", "time/step_s", "{:6.2f}s", 1.0),
    ("tok/s", "throughput/tokens_per_s", "{:7.0f}", 1.0),
)
"""Heading, metric, format and factor of each column of a step's line: 80 columns with steps up to 9999. Seconds by
phase are in `metrics.jsonl` and the report."""

HEADER_EVERY = 25


class _Counted(ProgressColumn):
    """A progress column for tasks of known length; a mere wait shows its name and a clock."""

    def __init__(self, column: ProgressColumn) -> None:
        super().__init__()
        self._column = column

    def render(self, task: Task) -> RenderableType:
        return "" if task.total is None else self._column(task)


class ConsoleView(RunView):
    """Prints one line per step, and below it (only in a terminal) a bar for the run and one for the current phase.
    Every `HEADER_EVERY` steps it shows the remaining time; at the end where the time went."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or SafeConsole(file=sys.stdout, highlight=False, soft_wrap=True)
        self._lines = 0
        self._rules: Mapping[str, str] = {}
        self._synced: tuple[int, int, tuple[str, ...]] | None = None
        self._phase: TaskID | None = None
        self._run: TaskID | None = None
        self._totals = Totals()
        self._progress = Progress(
            TextColumn("{task.description:<9}"),
            _Counted(BarColumn(bar_width=30)),
            _Counted(MofNCompleteColumn()),
            TimeElapsedColumn(),
            _Counted(TextColumn("left")),
            _Counted(TimeRemainingColumn()),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )

    def __enter__(self) -> ConsoleView:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()
        for line in self._totals.lines() if error == (None, None, None) else ():
            self._print(line)

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[None]:
        outer, self._phase = self._phase, self._progress.add_task(name.replace("_", " "), total=total)
        try:
            yield
        finally:
            self._progress.remove_task(self._phase)
            self._phase = outer

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Shows a line with a clock that vanishes; in a file, one that stays."""
        if not self.console.is_terminal:
            self._print(f"{what} ...")
        task = self._progress.add_task(what, total=None)  # several at once, as roles start concurrently
        try:
            yield
        finally:
            self._progress.remove_task(task)

    def advance(self, count: int = 1) -> None:
        if self._phase is not None:
            self._progress.advance(self._phase, count)

    def step(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        self._show_run("steps", step, steps)
        self._totals.step(metrics)
        if self._lines % HEADER_EVERY == 0:
            if (left := self._totals.left(steps - step + 1)) and self._lines:
                self._print(left)
            self._print(" " * (len(str(steps)) * 2 + 2) + "  ".join(_heading(*column) for column in COLUMNS))
        self._lines += 1
        figures = "  ".join(_figure(metrics, *column) for column in COLUMNS)
        self._print(f"{step:>{len(str(steps))}}/{steps} {figures}")

    def sft_step(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        self._show_run("warm-up", step, steps)
        if step == steps or step % max(steps // 5, 1) == 0:
            self._print(f"sft {step:>{len(str(steps))}}/{steps}  loss {metrics['sft/loss']:.4f}")

    def pairs_step(self, label: str, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        self._show_run("steps", step, steps)
        if step == steps or step % max(steps // 10, 1) == 0:
            loss, accuracy = metrics[f"{label}/loss"], metrics[f"{label}/accuracy"]
            self._print(f"{label} {step:>{len(str(steps))}}/{steps}  loss {loss:.4f}  accuracy {accuracy:.1%}")

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        for line in eval_lines(step, metrics, self._rules):
            self._print(line)

    def judged(self, rules: Mapping[str, str]) -> None:
        self._rules = dict(rules)

    def saved(self, step: int, path: Path) -> None:
        self._print(f"saved {path}")

    def notice(self, text: str) -> None:
        self._print(text)

    def synced(self, report: SyncReport) -> None:
        """One line per sync: the version, transports, seconds, and moved bytes relative to the lower bound. Equal syncs
        are shown only once; times of all are in the metrics."""
        done = (report.num_bytes, report.moved_bytes, tuple(report.transports))
        if done == self._synced:
            return
        self._synced = done
        rate = report.num_bytes / max(report.seconds, 1e-9) / 1e9
        bound = (
            f"{report.moved_bytes / report.lower_bound_bytes:.2f} x bound" if report.lower_bound_bytes else "in place"
        )
        if report.base_bytes is not None:
            below = f", {report.base_bytes / 1e6:.1f} MB below it" if report.base_bytes else ""
            bound = f"{bound}; the adapter alone{below}"
        by = f" by {', '.join(report.transports)}" if report.transports else ""
        self._print(
            f"sync v{report.version}: {report.num_bytes / 1e6:.1f} MB{by}, {report.seconds * 1e3:.0f} ms, "
            f"{rate:.2f} GB/s, {bound}"
        )

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Shows nothing: samples are in `samples.jsonl` and the report."""

    def _show_run(self, name: str, done: int, total: int) -> None:
        if self._run is None or self._progress.tasks[0].total != total:
            if self._run is not None:
                self._progress.remove_task(self._run)
            self._run = self._progress.add_task(name, total=total)
        self._progress.update(self._run, completed=done)

    def _print(self, text: str) -> None:
        self.console.print(printable(text), markup=False)


def _heading(name: str, metric: str, form: str, factor: float) -> str:
    return f"{name:>{len(form.format(0.0))}}"


def _figure(metrics: Mapping[str, float], name: str, metric: str, form: str, factor: float) -> str:
    text = form.format(metrics[metric] * factor) if metric in metrics else "-"
    return f"{text:>{len(form.format(0.0))}}"
