"""Whether a run is running, and how much of it is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rlsdk.system.quantities import counted, duration
from rlsdk.trainer.tracking.step_times import has_own_time
from rlsdk.views.report.markup import escaped
from rlsdk.views.report.record import RunRecord

RECENT = 20
"""Newest steps from which the remaining time is estimated."""
STEP_TIMES = ("time/step_s", "sft/step_s", "reward_model/step_s", "dpo/step_s")
"""Seconds of a step, by kind of training."""
ASKED = {"sft/step_s": "sft.steps", "reward_model/step_s": "preferences.steps", "dpo/step_s": "preferences.steps"}
"""Where the number of steps is set; `trainer.steps` otherwise."""


class State(StrEnum):
    """What a run's folder says of it."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    """Somebody asked it to end; it has saved its state."""
    FAILED = "failed"
    DIED = "died"
    """Its process is gone without a word."""
    UNKNOWN = "unknown"
    """Of a run without a record of its end, on a system that does not tell who holds a lock."""


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The state of a run, and what explains it."""

    state: State
    note: str = ""


def state_of(record: RunRecord) -> RunState:
    """The state of a run at the time when its folder was read."""
    done, asked, seconds = progress(record)
    steps = f"{done} of {counted(asked, 'step')}" if asked else counted(done, "step")
    if record.is_locked:
        left = f", about {duration(seconds * (asked - done))} left" if seconds and asked > done else ""
        return RunState(state=State.RUNNING, note=f"{steps}{left}")
    if record.end:
        found = next((one for one in State if one == record.end.get("state")), State.UNKNOWN)
        why = record.end.get("why")
        return RunState(state=found, note=f"{steps}{f': {why}' if isinstance(why, str) and why else ''}")
    if asked and done >= asked:
        return RunState(state=State.FINISHED, note=steps)
    state = State.UNKNOWN if record.is_locked is None else State.DIED
    return RunState(state=state, note=f"{steps}; the same command with the same run name continues")


def progress(record: RunRecord) -> tuple[int, int, float]:
    """Finished steps, steps that were asked for (0: unknown), and mean seconds of the newest ones (0: unknown).

    A warm start counts as long as there is no step of the training after it.
    """
    for name in STEP_TIMES:
        rows = [line for line in record.metrics if name in line]
        if not rows and name == STEP_TIMES[0]:  # engines of tests measure no time
            rows = [line for line in record.metrics if "reward/mean" in line]
        if rows:
            recent = [line.get(name, 0.0) for line in rows if has_own_time(line)][-RECENT:]
            asked = _at(record.settings, ASKED.get(name, "trainer.steps"))
            known = asked if isinstance(asked, int) else 0
            return int(rows[-1]["step"]), known, sum(recent) / len(recent) if recent else 0.0
    return 0, 0, 0.0


def seconds_of(metrics: Mapping[str, float]) -> float:
    """Seconds of a step, with its evaluation."""
    return next((metrics[name] for name in STEP_TIMES if name in metrics), 0.0) + metrics.get("time/eval_s", 0.0)


def elapsed(rows: Sequence[Mapping[str, float]]) -> Mapping[str, list[float | None]]:
    """What a step stands at on other axes than its number: `time` in seconds, `tokens`. None: not known."""
    time = tokens = 0.0
    found: dict[str, list[float | None]] = {"time": [], "tokens": []}
    for row in rows:
        time += seconds_of(row)
        rate = row.get("throughput/tokens_per_s")
        tokens += 0.0 if rate is None else rate * row.get("time/step_s", 0.0)
        found["time"].append(time or None)
        found["tokens"].append(tokens or None)
    return {name: values for name, values in found.items() if any(value is not None for value in values)}


def state_line(found: RunState, updated: float | None) -> str:
    """The line under the title. `updated`: seconds since the epoch; the page's script says how long ago that was."""
    ago = "" if updated is None else f' · updated <span id="age" data-at="{updated:.0f}"></span>'
    note = f" · {escaped(found.note)}" if found.note else ""
    return f'<p class="state" data-state="{found.state}"><b>{found.state}</b>{note}{ago}</p>'


def _at(settings: Mapping[str, object], path: str) -> object:
    value: object = settings
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
