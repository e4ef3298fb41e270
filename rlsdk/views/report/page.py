"""One self-contained HTML page about a run, and its curves as one SVG file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlsdk.system.atomic import atomic_write_text
from rlsdk.system.printable import printable
from rlsdk.views.charts import Line, line_chart, sheet, stacked_bars
from rlsdk.views.report.curves import Chart, charts_of, data_of, folded, others_of
from rlsdk.views.report.facts import Headline, changed_from_defaults, fact_rows, headlines, title_of
from rlsdk.views.report.markup import document, escaped, facts, table
from rlsdk.views.report.notes import notes_section
from rlsdk.views.report.pictures import pictures_of
from rlsdk.views.report.record import RunRecord, read_run
from rlsdk.views.report.samples import sample_section, score_range
from rlsdk.views.report.state import state_line, state_of

PAGE, PLOT = "report.html", "curves.svg"
MAX_BARS = 120
SMOOTHED_FROM = 40
"""Number of steps from which curves are smoothed by default."""


def write_report(run_dir: Path) -> tuple[Path, Path]:
    """Writes `report.html` and `curves.svg` into the run's folder from what its JSONL tracker left there.

    Raises:
        ConfigError: the folder holds no metrics.
    """
    record = read_run(run_dir)
    page, plot = run_dir / PAGE, run_dir / PLOT
    atomic_write_text(plot, printable(curves_svg(record)))
    main, data = run_page(record)
    atomic_write_text(page, document(window_title(record), main, data))
    return page, plot


def run_page(record: RunRecord, *, is_live: bool = False) -> tuple[str, dict[str, Any]]:
    """Content of the page of one run, and the data of its curves. `is_live`: it says how old the newest step is."""
    charts, curves = folded([record], charts_of([record]))
    others, more = folded([record], others_of([record], charts), len(charts))
    changed = changed_from_defaults(record.settings)
    low, high = score_range(record.samples)
    data = data_of([record], [*charts, *others]) | {"worst": low, "best": high}
    main = "".join(
        [
            f"<h1>{escaped(record.name)}</h1>",
            f'<p class="subtitle">{escaped(title_of(record.settings, record.name))}</p>',
            state_line(state_of(record), record.updated if is_live else None),
            headline_cards(headlines(record)),
            facts([*fact_rows(record), *(logs_row(record) if is_live else ())]),
            notes_section(record.notes),
            f"<details><summary>{len(changed)} settings differ from the defaults</summary>{table(changed)}</details>",
            f"<h2>Curves</h2>{controls(len(record.metrics), data['axes'])}{curves}",
            pictures_of(record),
            f"<h2>Samples</h2>{sample_section(record.samples)}",
            f"<h2>All other metrics</h2><details><summary>{len(others)} curves</summary>{more}</details>",
            "<h2>Configuration</h2><details><summary>all fields</summary>"
            f"<pre>{escaped(record.config_text)}</pre></details>",
        ]
    )
    return main, data


def logs_row(record: RunRecord) -> list[tuple[str, str]]:
    """Where the outputs of the run's processes are; not for a page that is given to others."""
    folder = record.folder / "logs"
    return [("logs", str(folder))] if folder.is_dir() else []


def window_title(record: RunRecord) -> str:
    """The run's name first: a browser shows the beginning only."""
    return " \N{MIDDLE DOT} ".join(dict.fromkeys((record.name, title_of(record.settings, record.name))))


def headline_cards(found: Sequence[Headline]) -> str:
    """Large cards with a run's results and their intervals."""
    cards = "".join(
        f'<div class="card"><span class="quiet">{escaped(one.label)}</span><b>{escaped(one.value)}</b>'
        f'<span class="quiet">{escaped("; ".join(text for text in (one.interval, one.note) if text))}</span></div>'
        for one in found
    )
    return f'<div class="cards">{cards}</div>' if cards else ""


def controls(num_steps: int, axes: Mapping[str, object]) -> str:
    """What stands above the curves: smoothing, the axis, a search."""
    choices = "".join(f'<option value="{name}">{name}</option>' for name in ("step", *axes))
    value = 0.6 if num_steps >= SMOOTHED_FROM else 0
    return (
        '<div class="bar"><label>smoothing <input type="range" id="smoothing" min="0" max="0.98" step="0.02" '
        f'value="{value}"> <output id="smoothing-value"></output></label>'
        f'<label>axis <select id="axis">{choices}</select></label>'
        '<label>find <input type="search" id="find" placeholder="curve"></label><span class="quiet" id="kept"></span>'
        '<span class="quiet">Point at a curve for its values; drag to zoom in, double-click to zoom out.</span></div>'
    )


def curves_svg(record: RunRecord) -> str:
    """The same curves as one SVG, for use without HTML."""
    return sheet([_svg(record, chart) for chart in charts_of([record])])


def _svg(record: RunRecord, chart: Chart) -> str:
    if chart.kind == "stack":
        rows = [{label: m[name] for label, name in chart.curves.items() if name in m} for m in record.metrics]
        rows = [row for row in rows if row]
        return stacked_bars(chart.title, rows[:: max(len(rows) // MAX_BARS, 1)], unit=chart.unit)
    factor = 100.0 if chart.unit == "%" else 1.0
    lines = [
        Line(name=label, points=[(m["step"], m[metric] * factor) for m in record.metrics if metric in m])
        for label, metric in chart.curves.items()
    ]
    return line_chart(chart.title, [line for line in lines if line.points], unit=chart.unit)
