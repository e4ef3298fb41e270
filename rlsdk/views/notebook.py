"""Shows a run in a notebook: a progress bar, the newest metrics and a chart in the cell's output, updated live."""

from __future__ import annotations

import html
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlsdk.interfaces import SyncReport
from rlsdk.system.printable import printable
from rlsdk.trainer.tracking.events import RunView
from rlsdk.views.charts import Line, line_chart
from rlsdk.views.figures import eval_lines

CURVES = ("reward/mean", "eval/accuracy_greedy", "eval/accuracy_sampled", "sft/loss", "reward_model/loss",
          "dpo/loss")  # fmt: skip
"""Metrics that are drawn if the run has them."""
FIGURES = {"reward": "reward/mean", "accuracy": "reward/accuracy", "tokens": "response/tokens_mean",
           "entropy": "policy/entropy", "KL": "policy/approx_kl", "grad norm": "policy/grad_norm", "loss": "sft/loss",
           "s/step": "time/step_s", "tokens/s": "throughput/tokens_per_s"}  # fmt: skip
SHOWN_NOTICES = 6
EVERY_S = 0.5
"""Seconds between updates of the cell, as a browser can handle no more."""


class NotebookView(RunView):
    """Shows one HTML output and updates it."""

    def __init__(self) -> None:
        """Draws nothing yet."""
        self._handle: Any = None
        self._notices: list[str] = []
        self._points: dict[str, list[tuple[float, float]]] = {}
        self._latest: dict[str, float] = {}
        self._rules: dict[str, str] = {}
        self._done, self._total = 0, 0
        self._doing = "starting"
        self._drawn = 0.0

    def __enter__(self) -> NotebookView:
        from IPython.display import HTML, display

        self._handle = display(HTML(self.page()), display_id=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._doing = "ended" if error and error[0] is None else "failed"
        self._draw(now=True)

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[None]:
        before, self._doing = self._doing, name.replace("_", " ")
        self._draw()
        try:
            yield
        finally:
            self._doing = before

    def step(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        self._add(step, steps, metrics)

    def sft_step(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        self._add(step, steps, metrics)

    def pairs_step(self, label: str, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        self._add(step, steps, metrics)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        for name in CURVES:
            if name in metrics:
                self._points.setdefault(name, []).append((step, metrics[name]))
        for line in eval_lines(step, metrics, self._rules):
            self.notice(line)

    def judged(self, rules: Mapping[str, str]) -> None:
        self._rules = dict(rules)

    def saved(self, step: int, path: Path) -> None:
        self.notice(f"saved {path}")

    def notice(self, text: str) -> None:
        self._notices.append(text)
        self._draw(now=True)

    def synced(self, report: SyncReport) -> None:
        """Shows nothing: time and bytes of syncs are metrics."""

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Shows nothing: samples are in `run.samples`."""

    def page(self) -> str:
        """The current output."""
        share = self._done / self._total if self._total else 0.0
        bar = f'<progress value="{share:.4f}" max="1" style="width:20em"></progress>'
        figures = " &middot; ".join(
            f"{label} <b>{self._latest[name]:.4g}</b>" for label, name in FIGURES.items() if name in self._latest
        )
        charts = [line_chart(name, [Line(name=name, points=points)]) for name, points in self._points.items()]
        notices = "".join(f"<div>{html.escape(printable(text))}</div>" for text in self._notices[-SHOWN_NOTICES:])
        return (
            f"<div>{bar} step {self._done}/{self._total or '?'} &middot; {html.escape(self._doing)}</div>"
            f"<div>{figures}</div><div>{''.join(charts)}</div>"
            f'<div style="font-family:monospace;font-size:85%">{notices}</div>'
        )

    def _add(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        self._done, self._total = step, steps
        self._latest = dict(metrics)
        for name in CURVES:
            if name in metrics:
                self._points.setdefault(name, []).append((step, metrics[name]))
        self._draw(now=step == steps)

    def _draw(self, *, now: bool = False) -> None:
        if self._handle is None or not (now or time.monotonic() - self._drawn > EVERY_S):
            return
        from IPython.display import HTML

        self._drawn = time.monotonic()
        self._handle.update(HTML(self.page()))
