"""Comparison of several runs on one page: results, differing settings, and overlaid curves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlsdk.interfaces import ConfigError
from rlsdk.system.atomic import atomic_write_text
from rlsdk.views.report.curves import Chart, charts_of, data_of, folded, others_of
from rlsdk.views.report.facts import NOT_SHOWN, SHOWN_CHARS, fact_rows, headlines, leaves, readable
from rlsdk.views.report.markup import document, escaped, table
from rlsdk.views.report.page import controls
from rlsdk.views.report.record import RunRecord, read_run

MOST_RUNS = 20
MISSING = "\N{EN DASH}"
JUDGING = ("rewards", "eval.correct_reward", "eval.correct_from", "eval.sets")
"""Settings by which answers are judged: where they differ, accuracies and rewards of two runs are different figures."""


def write_comparison(run_dirs: Sequence[Path], file: Path) -> Path:
    """Writes one page about several runs.

    Raises:
        ConfigError: fewer than two runs, too many, or a run without metrics.
    """
    if not 2 <= len(run_dirs) <= MOST_RUNS:
        raise ConfigError(
            f"{len(run_dirs)} run{'' if len(run_dirs) == 1 else 's'} cannot be compared: "
            f"give 2 to {MOST_RUNS} folders, as in `rlsdk compare runs/A runs/B`; `rlsdk report` is for one"
        )
    records = [read_run(Path(run_dir)) for run_dir in run_dirs]
    names = names_of(records)
    main, data = comparison_page(records, names)
    atomic_write_text(file, document(f"rlsdk: {' | '.join(names)}", main, data))
    return file


def comparison_page(records: Sequence[RunRecord], names: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Content of the page, and the data of its curves."""
    known = {name for record in records for name in record.names}
    found = [chart for chart in apart(charts_of(records)) if known.issuperset(chart.curves.values())]
    charts, curves = folded(records, found)
    others, more = folded(records, others_of(records, charts), len(charts))
    data = data_of(records, [*charts, *others], names)
    differing = different_settings(records)
    settings = table(differing, ["setting", *names]) if differing else "<p>All settings are equal.</p>"
    main = "".join(
        [
            f"<h1>{escaped(f'Comparison of {len(records)} runs')}</h1>",
            f"<h2>Results</h2>{_judged_apart(differing)}{table(_figures(records), ['', *names])}",
            f"<h2>Settings that differ</h2>{settings}",
            f"<h2>Curves</h2>{controls(max(len(record.metrics) for record in records), data['axes'])}{curves}",
            f"<h2>All other metrics</h2><details><summary>{len(others)} curves</summary>{more}</details>",
        ]
    )
    return main, data


def names_of(records: Sequence[RunRecord]) -> list[str]:
    """Name of each run: its folder's name, with as much of the path as makes it unique."""
    paths = [record.folder.absolute() for record in records]
    depth = 1
    while True:
        names = [str(Path(*path.parts[-depth:])) for path in paths]
        count = Counter(names)
        if max(count.values()) == 1:
            return names
        if depth > max(len(path.parts) for path in paths):
            return [f"{name} ({at})" for at, name in enumerate(names, 1)]
        depth += 1


def apart(charts: Sequence[Chart]) -> list[Chart]:
    """One chart for each metric, since colours distinguish the runs."""
    found = []
    for chart in charts:
        for label, metric in chart.curves.items():
            title = chart.title if len(chart.curves) == 1 else f"{chart.title}: {label}"
            found.append(replace(chart, title=title, curves={label: metric}))
    return found


def different_settings(records: Sequence[RunRecord]) -> list[list[str]]:
    """Fields with different values, and the value of each run. A path in the run's own folder begins with `RUN`, so
    that different names of folders are no difference."""
    flat = [_without_folder(record) for record in records]
    fields = dict.fromkeys(name for settings in flat for name in settings)
    rows = []
    for name in fields:
        values = [settings.get(name, MISSING) for settings in flat]
        if name and name not in NOT_SHOWN and any(value != values[0] for value in values):
            rows.append([name, *(readable(value)[:SHOWN_CHARS] for value in values)])
    return rows


def _judged_apart(differing: Sequence[Sequence[str]]) -> str:
    """A warning if the runs judge answers in different ways; empty otherwise."""
    by = [name for name, *_ in differing if any(name == one or name.startswith(f"{one}.") for one in JUDGING)]
    if not by:
        return ""
    return (
        f"<p>These runs judge answers in different ways ({escaped(', '.join(by))}, below), so their accuracies and "
        "rewards do not compare. <code>rlsdk eval CHECKPOINT --reward R</code> judges each by the same reward.</p>"
    )


def _without_folder(record: RunRecord) -> dict[str, object]:
    """The settings by field, with `RUN` for the run's folder, both its current and its original path."""
    settings = dict(leaves(record.settings, ""))
    made = Path(str(settings.get("trainer.run_dir") or "."), str(settings.get("trainer.run_name") or record.name))
    folders = {str(made), str(record.folder.absolute())}
    for name, value in settings.items():
        for folder in folders:
            if isinstance(value, str) and (value == folder or value.startswith(f"{folder}/")):
                settings[name] = value = f"RUN{value.removeprefix(folder)}"
    return settings


def _notes(record: RunRecord) -> dict[str, str]:
    return {"notes": "; ".join(note.text for note in record.notes)} if record.notes else {}


def _figures(records: Sequence[RunRecord]) -> list[list[str]]:
    found = [{one.label: f"{one.value} ({one.interval})" if one.interval else one.value for one in headlines(record)}
             | dict(fact_rows(record)) | _notes(record) for record in records]  # fmt: skip
    labels = dict.fromkeys(label for figures in found for label in figures)
    shown = [label for label in labels if label not in ("run", "command")]
    return [[label, *(figures.get(label, MISSING) for figures in found)] for label in shown]
