"""One self-contained HTML page about a run: curves, time by phase, samples with their rewards, the configuration."""

from __future__ import annotations

import html
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rlsdk
from rlsdk.interfaces import ConfigError
from rlsdk.kit.atomic import atomic_write_text
from rlsdk.kit.printable import printable
from rlsdk.trainer.charts import Line, line_chart, sheet, stacked_bars
from rlsdk.trainer.metrics import phase_names
from rlsdk.trainer.pool_chart import pools_section
from rlsdk.trainer.report_facts import changed_from_defaults, headline, settings_of, table, terms_of, title_of
from rlsdk.trainer.report_samples import sample_groups
from rlsdk.trainer.trackers import SAMPLES_FILE, read_lines, read_metrics

CHARTS: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    ("Accuracy", "%", {"samples": "reward/accuracy", "eval sampled": "eval/accuracy_sampled",
                       "eval greedy": "eval/accuracy_greedy"}),
    ("Reward", "", {"mean": "reward/mean", "std": "reward/std"}),
    ("Response tokens", "", {"mean": "response/tokens_mean", "longest": "response/tokens_max"}),
    ("Entropy and KL, nats", "", {"KL of update": "policy/approx_kl", "entropy": "policy/entropy",
                                  "KL to reference": "policy/kl"}),
    ("Log-prob difference, train against rollout, nats", "", {"mean": "parity/log_prob_diff_mean"}),
    ("Gradient norm", "", {"before clipping": "policy/grad_norm"}),
    ("Shares", "%", {"clipped": "policy/clip_fraction", "truncated": "response/truncated_share",
                     "with signal": "reward/groups_with_signal", "reward failed": "reward/invalid_share"}),
    ("Idle share of each pool", "%", {"training": "time/train_idle_share", "rollout": "time/rollout_idle_share"}),
    ("Staleness, trainer steps", "", {"mean": "schedule/staleness_mean", "largest": "schedule/staleness_max"}),
    ("Tokens per second", "", {"all tokens": "throughput/tokens_per_s"}),
)  # fmt: skip
"""Title, unit, and metric by the curve's name."""

MAX_BARS = 120
STYLE = """:root { color-scheme: light dark } body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
max-width: 60rem; padding: 0 1rem } .charts { display: flex; flex-wrap: wrap; gap: 1rem } .charts svg { max-width: 100%;
height: auto } table { border-collapse: collapse; font-size: 14px } td, th { border-bottom: 1px solid #8884;
padding: .3rem .5rem; text-align: left; vertical-align: top; overflow-wrap: anywhere } th { font-weight: 600 }
.text { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.4 ui-monospace, monospace } .label { color: #888;
font-size: 12px } details { margin: .5rem 0; border-left: 3px solid #8884; padding-left: .6rem } .pair { display: flex;
flex-wrap: wrap; gap: .6rem } .card { flex: 1 1 20rem; background: #8881; padding: .5rem; min-width: 0 }
pre { overflow: auto; background: #8881; padding: 1rem; font-size: 12px }"""
"""Of the page: two columns on a wide screen, one on a phone."""
_LARGEST = 1e15


def write_report(run_dir: Path) -> tuple[Path, Path]:
    """Writes `report.html` and `curves.svg` into the run's folder from what its JSONL tracker left there.

    Raises:
        ConfigError: the folder holds no metrics.
    """
    metrics = [figures for line in read_metrics(run_dir) if "step" in (figures := _figures(line))]
    if not metrics:
        raise ConfigError(
            f"{str(run_dir)!r} holds no metrics.jsonl with lines in it. Give a run's folder (runs/NAME), "
            "and keep 'jsonl' among tracking.trackers"
        )
    terms = ("Terms of the reward", "", {name.removeprefix("reward/"): name for name in terms_of(metrics)})
    charts = [_chart(title, unit, curves, metrics) for title, unit, curves in (*CHARTS[:2], terms, *CHARTS[2:])]
    charts.insert(4, _phases(metrics))
    page, plot = run_dir / "report.html", run_dir / "curves.svg"
    atomic_write_text(plot, printable(sheet(charts)))
    atomic_write_text(page, printable(_page(run_dir, metrics, charts)))
    return page, plot


def _figures(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line: what anybody may have written there besides is left out."""
    return {str(name): number for name, value in line.items() if (number := _number(value)) is not None}


def _number(value: object) -> float | None:
    """The value as a number that can be drawn; None where it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _LARGEST:
        return None
    return float(value)


def _chart(title: str, unit: str, curves: Mapping[str, str], metrics: Sequence[Mapping[str, Any]]) -> str:
    factor = 100.0 if unit == "%" else 1.0
    lines = [
        Line(name=name, points=[(m["step"], m[metric] * factor) for m in metrics if metric in m])
        for name, metric in curves.items()
    ]
    return line_chart(title, [line for line in lines if line.points], unit=unit)


def _phases(metrics: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        {key[5:-2]: m[key] for key in phase_names(m) if key != "time/eval_s"} for m in metrics if "time/step_s" in m
    ]
    stride = max(len(rows) // MAX_BARS, 1)
    return stacked_bars("Seconds by phase", rows[::stride], unit="s")


def _page(run_dir: Path, metrics: Sequence[Mapping[str, Any]], charts: Sequence[str]) -> str:
    config_file = run_dir / "config.yaml"
    config = config_file.read_text(encoding="utf-8", errors="replace") if config_file.is_file() else ""
    settings = settings_of(config)
    changed = changed_from_defaults(settings)
    name = html.escape(run_dir.name)
    return f"""<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>rlsdk: {name}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head><body>
<h1>{html.escape(title_of(settings, run_dir.name))}</h1><p>run {name}</p>
{table([*headline(metrics), *_facts(metrics)])}
<details><summary>{len(changed)} settings differ from the defaults</summary>{table(changed)}</details>
<h2>Curves</h2><div class="charts">{"".join(charts)}</div>
{pools_section(run_dir)}
<h2>Samples</h2>{sample_groups(read_lines(run_dir / SAMPLES_FILE))}
<h2>Configuration</h2><details><summary>all fields</summary><pre>{html.escape(config)}</pre></details></body></html>
"""


def _facts(metrics: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    seconds = [m["time/step_s"] for m in metrics if "time/step_s" in m]
    rates = [m["throughput/tokens_per_s"] for m in metrics if "throughput/tokens_per_s" in m]
    rows = [("steps", f"{metrics[-1]['step']:.0f}"), ("seconds in steps", f"{sum(seconds):.1f}")]
    if rates:
        rows.append(("tokens per second, median", f"{sorted(rates)[len(rates) // 2]:,.0f}"))
    return [*rows, ("rlsdk, Python", f"{rlsdk.__version__}, {platform.python_version()} ({platform.machine()})")]
