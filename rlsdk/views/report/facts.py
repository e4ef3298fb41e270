"""The header of a report: a run's settings, its results, and their uncertainty."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rlsdk.config import RunConfig
from rlsdk.system.quantities import counted, duration
from rlsdk.trainer.checkpoints.run_folder import INPUTS
from rlsdk.trainer.tracking.step_times import has_own_time
from rlsdk.views.report.record import RunRecord
from rlsdk.views.report.statistics import LEVEL_Z, Estimate, ends_of

SHOWN_CHARS = 160
MAX_CHARS = 400
"""Most characters of a fact, such as the command."""
WRITTEN = "%Y-%m-%dT%H:%M:%S%z"
"""Time format of the run's history."""
NOT_SHOWN = ("trainer.run_dir", "trainer.run_name", "trainer.resume")
"""Settings of a run's location, which do not affect its results."""
EVAL = "eval/"
GENERIC = ("model", "checkpoint", "data", "train")
"""File and folder names that are common to many runs."""


@dataclass(frozen=True, kw_only=True)
class Headline:
    """One result of a run."""

    label: str
    first: Estimate | None
    last: Estimate
    in_percent: bool
    note: str
    """What was averaged."""

    @property
    def value(self) -> str:
        before = "" if self.first is None else f"{self._shown(self.first.mean)} \N{RIGHTWARDS ARROW} "
        return before + self._shown(self.last.mean)

    @property
    def interval(self) -> str:
        """Interval of the last value as text; empty if unknown."""
        if self.last.half_width is None:
            return ""
        low, high = self.last.mean - self.last.half_width, self.last.mean + self.last.half_width
        if self.in_percent:
            low, high = max(low, 0.0), min(high, 1.0)
        return f"95% interval {self._shown(low)} to {self._shown(high)}"

    def _shown(self, value: float) -> str:
        return f"{value:.1%}" if self.in_percent else f"{value:.3g}"


def title_of(settings: Mapping[str, Any], name: str) -> str:
    """Model, data and algorithm in one line; the run's name if these are unknown."""
    model, folder = _at(settings, "model.path"), str(_at(settings, "trainer.run_name") or name)
    made_here = f"/{folder}/" in str(model)  # by the run itself: it has no name
    parts = ["small random model" if made_here else _tail(model), _data_name(_at(settings, "data.train"))]
    parts.append(str(_at(settings, "algorithm.recipe") or _at(settings, "algorithm.advantage") or ""))
    return " \N{MIDDLE DOT} ".join(part for part in parts if part) or name


def changed_from_defaults(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Field and value of every setting that differs from its default."""
    defaults = dict(leaves(RunConfig().model_dump(mode="json"), ""))
    return [
        (name, readable(value)[:SHOWN_CHARS])
        for name, value in leaves(settings, "")
        if name not in NOT_SHOWN and value not in (None, [], {}) and defaults.get(name) != value
    ]


def headlines(record: RunRecord) -> list[Headline]:
    """Results of the run: evaluations first, then the score if the reward is shaped, then the accuracy."""
    found = list(_evaluations(record.metrics))
    shaped = any(
        not math.isclose(m["reward/mean"], m.get("reward/accuracy", math.nan), rel_tol=1e-6, abs_tol=1e-9)
        for m in record.metrics
        if "reward/mean" in m
    )
    names = {"Score of training samples": ("reward/mean", False)} if shaped else {}
    names |= {
        "Accuracy of training samples": ("reward/accuracy", True),
        "Pairs ranked correctly": ("reward_model/accuracy", True),
        "Preferred answers more likely": ("dpo/accuracy", True),
        "Labelled answers on their side of the reference": ("kto/accuracy", True),
        "Steps labelled correctly": ("process_reward/accuracy", True),
    }
    if not any("reward/mean" in m for m in record.metrics):
        names["Loss of the last steps"] = ("sft/loss", False)
    for label, (name, in_percent) in names.items():
        values = [m[name] for m in record.metrics if name in m]
        if values:
            first, last = ends_of(values)
            note = f"mean of the last {last.count} steps" if first else f"mean of {counted(last.count, 'step')}"
            found.append(Headline(label=label, first=first, last=last, in_percent=in_percent, note=note))
    return found


def fact_rows(record: RunRecord) -> list[tuple[str, str]]:
    """Facts of the run: name and text of what was run, where, and how long it took."""
    starts = record.starts
    around: Mapping[str, Any] = next(
        (s["surroundings"] for s in reversed(starts) if isinstance(s.get("surroundings"), Mapping)), {}
    )
    steps = [m[name] for m in record.metrics for name in ("time/step_s", "sft/step_s") if name in m]
    evaluating = sum(m.get("time/eval_s", 0.0) for m in record.metrics)
    rates = sorted(m["throughput/tokens_per_s"] for m in record.metrics if _has_rate(m))
    backends = {kind: _text(_at(record.settings, f"{kind}.backend")) for kind in ("train", "rollout")}
    rows = [
        ("run", record.name),
        ("started", _moment(starts[0].get("time")) if starts else ""),
        ("command", _text(around.get("command"))),
        ("steps", _steps(record)),
        (
            "time",
            f"{duration(sum(steps))} in steps" + (f", {duration(evaluating)} in evaluations" if evaluating else ""),
        ),
        ("tokens per second", f"{rates[len(rates) // 2]:,.0f} (median step)" if rates else ""),
        ("engines", ", ".join(f"{kind} {name}" for kind, name in backends.items() if name)),
        ("machine", _text(around.get("machine"))),
        ("versions", _text(around.get("versions"))),
    ]
    if len(starts) > 1:
        rows.insert(2, ("resumed", f"{counted(len(starts) - 1, 'time')}, last at step {_text(starts[-1].get('step'))}"))
    return [(name, text) for name, text in rows if text]


def _has_rate(metrics: Mapping[str, float]) -> bool:
    return "throughput/tokens_per_s" in metrics and has_own_time(metrics)


def readable(value: object) -> str:
    """A setting as YAML, without unset fields."""
    if isinstance(value, Mapping):
        items = (f"{name}: {readable(item)}" for name, item in value.items() if item not in (None, [], {}))
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(readable, value))}]"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _steps(record: RunRecord) -> str:
    """Steps of training, with those of a warm start next to them; both count from 1."""
    warm = sum("sft/loss" in line for line in record.metrics)
    trained = [line["step"] for line in record.metrics if any(_is_of_training(name) for name in line)]
    if not trained or max(trained) == 0:
        return f"{record.metrics[-1]['step']:.0f}" + (" supervised" if warm else "")
    asked = _at(record.settings, "trainer.steps")
    left = f" of {asked}" if isinstance(asked, int) and asked > max(trained) else ""
    return f"{max(trained):.0f}{left}" + (f", after {warm} supervised ones" if warm else "")


def _is_of_training(name: str) -> bool:
    return name != "step" and not name.startswith(("sft/", "eval/", "time/eval"))


def leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    """Dotted path and value of every leaf of nested mappings."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def _evaluations(metrics: Sequence[Mapping[str, float]]) -> Iterator[Headline]:
    for name in dict.fromkeys(name for m in metrics for name in m if name.startswith(EVAL)):
        in_percent = "accuracy" in name
        if "_se" in name or not (in_percent or _is_shaped(name, metrics)):
            continue
        found = [_measured(m, name) for m in metrics if name in m]
        label = name.removeprefix(EVAL).replace("_", " ").replace("/", " ")
        first = found[0] if len(found) > 1 else None
        note = "first and last evaluation" if first else "one evaluation"
        yield Headline(label=f"Held-out {label}", first=first, last=found[-1], in_percent=in_percent, note=note)


def _is_shaped(name: str, metrics: Sequence[Mapping[str, float]]) -> bool:
    """Whether an evaluation's score differs from its accuracy."""
    accuracy = name.replace("/reward", "/accuracy", 1)
    return accuracy != name and any(name in m and m.get(accuracy, m[name]) != m[name] for m in metrics)


def _measured(metrics: Mapping[str, float], name: str) -> Estimate:
    """A result with the interval from the evaluation's standard error."""
    stem, _, part = name.rpartition("_")
    error = next((metrics[other] for other in (f"{name}_se", f"{stem}_se_{part}") if other in metrics), None)
    return Estimate(mean=metrics[name], half_width=None if error is None else LEVEL_Z * error)


def _text(value: object) -> str:
    """Text of an untrusted record: numbers and strings, a mapping as a list."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(item)}" for name, item in value.items() if _text(item))
    text = str(value) if isinstance(value, str | int | float) else ""
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]} ..."


def _moment(value: object) -> str:
    """A time in readable form, in UTC; unchanged if it is not a time."""
    try:
        return f"{datetime.strptime(_text(value), WRITTEN).astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError):
        return _text(value)


def _at(settings: Mapping[str, Any], path: str) -> Any:
    value: Any = settings
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _data_name(source: object) -> str:
    parts = str(source).split("/")
    return "rows given in Python" if len(parts) > 2 and parts[-2] == INPUTS else _tail(source)


def _tail(name: object) -> str:
    """The end of a path: its last part, preceded by the one before it if the last is generic (`runs/base/model`)."""
    text = str(name) if isinstance(name, str) else ""
    if not text.startswith(("/", ".")):
        return text
    parts = text.rstrip("/").split("/")
    return "/".join(parts[-2:] if parts[-1].partition(".")[0] in GENERIC else parts[-1:])
