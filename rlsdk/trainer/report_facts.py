"""What stands above the curves of a report: what the run was, what it came to, and how sure that is."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlsdk.config import RunConfig
from rlsdk.config.yaml_text import read_yaml
from rlsdk.interfaces import ConfigError

WINDOW_SHARE, LEAST_WINDOW = 0.1, 5
"""Steps at either end of the run that are averaged: one step alone is noise."""
SHOWN_CHARS = 160
OWN_TERMS = frozenset(
    {"reward/mean", "reward/std", "reward/accuracy", "reward/invalid_share", "reward/groups_with_signal"}
)
"""What a run logs under `reward/` besides the terms of the reward."""
NOT_SHOWN = ("trainer.run_dir", "trainer.run_name", "trainer.resume")
"""Where a run is, not what it computes."""


def settings_of(text: str) -> Mapping[str, Any]:
    """The settings that a run's `config.yaml` holds; empty where it cannot be read."""
    try:
        found, _ = read_yaml(text, "config.yaml")
    except ConfigError:
        return {}
    return found if isinstance(found, Mapping) else {}


def title_of(settings: Mapping[str, Any], name: str) -> str:
    """Model, data and algorithm in one line; the run's name where nothing is known."""
    parts = [_tail(_at(settings, "model.path")), _tail(_at(settings, "data.train"))]
    parts.append(_at(settings, "algorithm.recipe") or _at(settings, "algorithm.advantage"))
    return " · ".join(str(part) for part in parts if part) or name


def changed_from_defaults(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Field and value of every setting that is not the default."""
    defaults = dict(_leaves(RunConfig().model_dump(mode="json"), ""))
    return [
        (name, str(value)[:SHOWN_CHARS])
        for name, value in _leaves(settings, "")
        if name not in NOT_SHOWN and value not in (None, [], {}) and defaults.get(name) != value
    ]


def headline(metrics: Sequence[Mapping[str, float]]) -> list[tuple[str, str]]:
    """What the run came to: means over its first and its last steps with their standard errors, and evaluations.

    The score comes first where it is not the accuracy: a shaped reward is what was trained on.
    """
    shaped = any(m.get("reward/mean") != m.get("reward/accuracy") for m in metrics if "reward/mean" in m)
    names = {"score of training samples": "reward/mean"} if shaped else {}
    names |= {"accuracy of training samples": "reward/accuracy"}
    rows = [(label, text) for label, name in names.items() if (text := _ends(metrics, name, name != "reward/mean"))]
    evaluated = dict.fromkeys(name for m in metrics for name in m if name.startswith("eval/"))
    for name in evaluated:
        if "accuracy" in name and not name.endswith("_se"):
            rows.append((f"held-out {name.removeprefix('eval/').replace('_', ' ')}", _first_and_last(metrics, name)))
    return rows


def terms_of(metrics: Sequence[Mapping[str, float]]) -> list[str]:
    """Names of the metrics that are terms of the reward."""
    names = dict.fromkeys(name for m in metrics for name in m if name.startswith("reward/"))
    return [name for name in names if name not in OWN_TERMS and name.count("/") == 1 and not name.endswith("_share")]


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Two columns, escaped."""
    cells = "".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>" for name, text in rows)
    return f"<table>{cells}</table>"


def _ends(metrics: Sequence[Mapping[str, float]], name: str, in_percent: bool) -> str:
    values = [m[name] for m in metrics if name in m]
    if not values:
        return ""
    window = min(max(math.ceil(len(values) * WINDOW_SHARE), LEAST_WINDOW), len(values))
    first, last = _mean(values[:window], in_percent), _mean(values[-window:], in_percent)
    if window == len(values):
        return f"{last} (mean of {len(values)} steps)"
    return f"{first} → {last} (means of the first and the last {window} steps)"


def _mean(values: Sequence[float], in_percent: bool) -> str:
    mean = sum(values) / len(values)
    if len(values) == 1:
        return f"{mean:.1%}" if in_percent else f"{mean:.3g}"
    spread = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
    return f"{mean:.1%} ±{spread:.1%}" if in_percent else f"{mean:.3g} ±{spread:.2g}"


def _first_and_last(metrics: Sequence[Mapping[str, float]], name: str) -> str:
    """The two values with their standard errors, where the run has measured them."""
    stem, _, part = name.rpartition("_")
    errors = (f"{name}_se", f"{stem}_se_{part}")
    shown = []
    for m in [m for m in metrics if name in m]:
        error = next((m[other] for other in errors if other in m), None)
        shown.append(f"{m[name]:.1%}" + (f" ±{error:.1%}" if error else ""))
    return shown[0] if len(shown) == 1 else f"{shown[0]} → {shown[-1]}"


def _leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def _at(settings: Mapping[str, Any], path: str) -> Any:
    value: Any = settings
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _tail(name: object) -> str:
    text = str(name) if isinstance(name, str) else ""
    return text.rstrip("/").rpartition("/")[2] if text.startswith(("/", ".")) else text
