"""Measures device rates for simulations from the journal and metrics of a synchronous run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from rlsdk.interfaces import ConfigError
from rlsdk.interfaces.spelling import Setting
from rlsdk.planning.rates import FORWARD_SPEEDUP, Rates
from rlsdk.rollouts.journal.journal import FOLDER
from rlsdk.rollouts.journal.records import rows_from
from rlsdk.rollouts.journal.segments import records
from rlsdk.trainer.tracking.step_times import has_own_time

SKIPPED = 0.25
"""Share of the first steps that are skipped, in which caches, memory and processes warm up."""


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Devices of the measured run."""

    train: int
    replicas: int
    per_replica: int
    max_running: int
    cores: int = 0
    """Processors of the machine, if the devices are processors of it; 0: they are not, or unknown."""


@dataclass(frozen=True, kw_only=True)
class StepSamples:
    """The samples of one synchronous step."""

    start: float
    """Time of their start in seconds."""
    ends: Sequence[float]
    """Time at which each was generated and graded."""
    lengths: Sequence[int]
    """Number of tokens of each."""


def measured_rates(
    run_dir: Path, metrics: Sequence[Mapping[str, float]], devices: Devices, beside: Sequence[Path] = ()
) -> tuple[Rates, list[int]]:
    """Rates and lengths of a synchronous run.

    Lengths and times of samples come from its journal; seconds of update and sync from its metrics.

    Args:
        run_dir: its folder.
        metrics: of its steps.
        devices: that it ran on.
        beside: further synchronous runs of this model on these devices, with fewer or more concurrent samples: the time
            that another sample adds to a decoding step is fitted to all of them. If samples continue under new weights,
            those of several steps share a decoding step, which no single synchronous run shows.

    Raises:
        ConfigError: the run has no journal, no metrics of steps, or is not synchronous.
    """
    steps, updates = read_steps(run_dir / FOLDER)
    known = [m for m in metrics if "time/rollout_s" in m and m.get("response/tokens_max", 0) > 0]
    timed = {int(m["step"]): m for m in known if has_own_time(m)}
    if not steps or not timed:
        raise ConfigError(f"{str(run_dir)!r} has no journal with samples, or no metrics.jsonl with steps")
    if any(m.get("schedule/staleness_max", 0) > 0 for m in timed.values()):
        raise ConfigError(
            f"{str(run_dir)!r} trained on stale samples: its steps overlap, so that they say nothing of each half. "
            f"Measure a run with {Setting('schedule.max_staleness', 0)}"
        )
    both = sorted(set(steps) & set(timed))
    later = both[int(SKIPPED * len(both)) :]
    if not later:
        raise ConfigError(
            f"{str(run_dir)!r}: no step is in its journal and in its metrics; give {Setting('schedule.journal', 'all')}"
        )
    others = [_later(read_steps(folder / FOLDER)[0]) for folder in beside]
    own = [steps[step] for step in later]
    further = fit_decoding([step for run in (own, *others) for step in run], devices)[2] if others else None
    latency, decode, per_sample = fit_decoding(own, devices, per_sample=further)
    # Time after the last token of a step that is spent waiting for grades.
    graded = min(median(timed[step].get("time/reward_s", 0.0) for step in later), latency)
    # In sampled tokens, the unit of the simulation; includes the cost of their prompts.
    trained = median(sum(steps[step].lengths) / training_s(step, timed, updates) for step in later)
    prompt = median(prompt_tokens(steps[step], timed[step]) for step in later)
    decoded_at = [seconds_over_fit(steps[step], devices, latency, decode, per_sample) for step in later]
    whole = 1.0 + prompt / mean(max(mean(steps[step].lengths), 1.0) for step in later)
    rates = Rates(
        decode_s=decode,
        decode_s_per_sample=per_sample,
        latency_s=latency - graded,
        grade_s=graded,
        prefill_tokens_per_s=FORWARD_SPEEDUP * whole * trained / devices.train * devices.per_replica,
        prompt_tokens=prompt,
        train_tokens_per_s=trained / devices.train,
        sync_s=median(timed[step].get("time/sync_s", 0.0) for step in later),
        controller_s=median(timed[step].get("time/controller_cpu_s", 0.0) for step in later),
        cores=devices.cores,
        update_variation=variation([sum(steps[s].lengths) / training_s(s, timed, updates) for s in later]),
        decode_variation=variation(decoded_at),
        max_running=devices.max_running,
        devices_per_replica=devices.per_replica,
    )
    return rates, [max(length, 1) for step in steps.values() for length in step.lengths]


def variation(values: Sequence[float]) -> float:
    """Standard deviation of the logarithm, from the middle two thirds, so that a few steps with other load on the
    machine have no effect."""
    low, high = np.quantile(np.log(np.maximum(values, 1e-9)), [0.16, 0.84])
    return float(high - low) / 2


def seconds_over_fit(samples: StepSamples, devices: Devices, latency: float, decode: float, per_sample: float) -> float:
    """Ratio of the seconds until the last sample of a step to those of the fit; see `fit_decoding`."""
    lengths = np.sort(np.asarray(samples.lengths))
    longest = int(lengths[-1])
    beside = _decoded(lengths, devices.replicas)[longest] - longest
    fitted = float(latency + longest * decode + per_sample * beside)
    return (max(samples.ends) - samples.start) / max(fitted, 1e-9)


def _later(steps: Mapping[int, StepSamples]) -> list[StepSamples]:
    """The steps after the warm-up."""
    return [steps[step] for step in sorted(steps)][int(SKIPPED * len(steps)) :]


def prompt_tokens(samples: StepSamples, metrics: Mapping[str, float]) -> float:
    """Mean number of tokens per sample that were trained besides sampled tokens."""
    trained = metrics.get("throughput/tokens_per_s", 0.0) * metrics["time/step_s"]
    return max(trained - sum(samples.lengths), 0.0) / len(samples.lengths)


def training_s(step: int, timed: Mapping[int, Mapping[str, float]], updates: Mapping[int, float]) -> float:
    """Seconds of a step in which the rollout pool is idle: log-probs, updates, and gaps between steps."""
    metrics = timed[step]
    beside = sum(metrics.get(f"time/{name}_s", 0.0) for name in ("rollout", "reward", "sync"))
    between = 0.0
    if step in updates and step - 1 in updates:
        between = max(updates[step] - updates[step - 1] - metrics["time/step_s"], 0.0)
    pauses = [
        max(updates[at] - updates[at - 1] - m["time/step_s"], 0.0)
        for at, m in timed.items()
        if at in updates and at - 1 in updates
    ]
    return metrics["time/step_s"] - beside + min(between, median(pauses) if pauses else 0.0)


def read_steps(folder: Path) -> tuple[dict[int, StepSamples], dict[int, float]]:
    """Reads a journal: the samples of each step for which they were started, and when its update was done. Steps that
    a resume repeats or continues are left out, and the last update before it: the time between is not that of a step.
    """
    starts: dict[int, float] = {}
    torn = set[int]()
    step_of: dict[int, int] = {}
    lengths: dict[int, list[tuple[float, int]]] = {}
    updates: dict[int, float] = {}
    for record in records(folder):
        match record["event"]:
            case "open" if record["begins"]:
                torn |= {step for step in starts if step > int(record["step"])}
                updates = {step: at for step, at in updates.items() if step < int(record["step"])}
            case "start":
                step = int(record["step"])
                starts.setdefault(step, float(record.get("at", 0.0)))
                step_of |= {int(group): step for group in record["groups"]}
            case "sample" if int(record["group"]) in step_of:
                lengths.setdefault(step_of[int(record["group"])], []).append(
                    (float(record.get("at", 0.0)), _length(record))
                )
            case "update":
                updates[int(record["step"])] = float(record.get("at", 0.0))
    steps = {
        step: StepSamples(start=starts[step], ends=[at for at, _ in samples], lengths=[length for _, length in samples])
        for step, samples in lengths.items()
        if step not in torn
    }
    return steps, {step: at for step, at in updates.items() if at}


def _length(record: Mapping[str, Any]) -> int:
    return sum(row.num_sampled for row in rows_from(record, (0,)))


def fit_decoding(
    steps: Sequence[StepSamples], devices: Devices, *, per_sample: float | None = None
) -> tuple[float, float, float]:
    """Fits seconds until the first token and for grading, of a decoding step with one sample, and for each further
    sample.

    A sample of l tokens ends after `latency + l * fixed + per_sample * (sum over its decoding steps of the samples in
    them)`: least squares over all samples, with all three at least 0. This holds if all samples of a step run at once;
    otherwise decoding steps are assumed to take equally long for any number of samples. `per_sample` is not fitted if
    it is given.
    """
    rows, seconds = [], []
    for step in steps:
        lengths = np.sort(np.asarray(step.lengths))
        if len(lengths) > devices.replicas * devices.max_running:
            return _longest(steps)
        ends: dict[int, list[float]] = {}
        for end, length in zip(step.ends, step.lengths, strict=True):
            ends.setdefault(length, []).append(end - step.start)
        decoded = _decoded(lengths, devices.replicas)
        for length, steps_of_length in ends.items():
            # All samples have equal weight: most have the lengths that determine the seconds of a step.
            weight = math.sqrt(len(steps_of_length))
            rows.append((weight, weight * length, weight * decoded[length]))
            seconds.append(weight * median(steps_of_length))
    table, took = np.asarray(rows), np.asarray(seconds)
    if per_sample is None:
        latency, fixed, per_sample = _least_squares(table, took)
    else:
        latency, fixed = _least_squares(table[:, :2], took - per_sample * table[:, 2])
    return (latency, fixed + per_sample, per_sample) if fixed + per_sample > 0 else _longest(steps)


def _decoded(lengths: np.ndarray[Any, Any], replicas: int) -> np.ndarray[Any, Any]:
    """For each length: sum, over the decoding steps of a sample of that length, of the samples that one replica
    decodes."""
    running = np.array([(lengths >= token).sum() for token in range(1, int(lengths[-1]) + 1)]) / replicas
    return np.concatenate([[0.0], np.cumsum(np.maximum(running, 1.0))])


def _least_squares(rows: np.ndarray[Any, Any], seconds: np.ndarray[Any, Any]) -> list[float]:
    """The best solution without negative components: with few unknowns every subset can be tried."""
    unknowns = rows.shape[1]
    best, least = np.zeros(unknowns), float("inf")
    for count in range(unknowns, 0, -1):
        for columns in itertools.combinations(range(unknowns), count):
            solution = np.linalg.lstsq(rows[:, columns], seconds, rcond=None)[0]
            error = float(((rows[:, columns] @ solution - seconds) ** 2).sum())
            if (solution >= 0).all() and error < least - 1e-12:
                best, least = np.zeros(unknowns), error
                best[list(columns)] = solution
    return [float(value) for value in best]


def _longest(steps: Sequence[StepSamples]) -> tuple[float, float, float]:
    return 0.0, median((max(step.ends) - step.start) / max(step.lengths) for step in steps), 0.0
