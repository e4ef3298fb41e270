"""A chart for notebooks and files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rlsdk.api.table import Table
from rlsdk.interfaces import ConfigError, nearest
from rlsdk.system.atomic import atomic_write_text
from rlsdk.system.printable import printable

DEFAULT = ("reward/mean", "eval/accuracy_sampled", "eval/accuracy_greedy", "response/tokens_mean", "policy/entropy",
           "policy/grad_norm", "sft/loss", "reward_model/loss", "reward_model/accuracy", "dpo/loss", "kto/loss",
           "dpo/accuracy", "process_reward/loss", "process_reward/accuracy")  # fmt: skip
"""Metrics that are drawn by default, if the run has them."""


class Chart:
    """Curves over the step, as SVG."""

    def __init__(self, svg: str) -> None:
        self.svg = svg

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes an SVG file atomically."""
        target = Path(path)
        atomic_write_text(target, self.svg)
        return target

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"Chart({len(self.svg)} characters of SVG; .save('curves.svg') writes it)"


def draw(metrics: Table, names: Sequence[str] = ()) -> Chart:
    """One chart for each metric.

    Raises:
        ConfigError: there is no metric of that name, or none at all.
    """
    from rlsdk.views.charts import Line, line_chart, sheet

    columns = metrics.columns
    for name in names:
        if name not in columns:
            raise ConfigError(
                f"metric {name!r}: the run has none of that name{nearest(name, columns)}; it has {columns}"
            )
    chosen = list(names) or [name for name in DEFAULT if name in columns]
    if not chosen:
        raise ConfigError("the run has logged no metrics yet, or has no 'jsonl' among tracking.trackers")
    charts = []
    for name in chosen:
        points = [(float(row["step"]), float(row[name])) for row in metrics if name in row]
        charts.append(line_chart(name, [Line(name=name, points=points)]))
    return Chart(printable(sheet(charts, columns=min(len(charts), 2))))
