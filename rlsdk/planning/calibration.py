"""Predicts durations of phases from those of another run, by rates only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rlsdk.config import RunConfig, load_config, roles
from rlsdk.config.role_names import ACTOR
from rlsdk.interfaces import ConfigError
from rlsdk.registry import Registry
from rlsdk.trainer.step_times import phase_names
from rlsdk.trainer.trackers import read_metrics

FAR = 4.0
"""Ratio of batch or model sizes to the calibrating run above which a note warns that rates may not hold."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Work of a step, in units to which seconds are assumed to be proportional."""

    num_parameters: int
    actor_devices: int
    rollout_devices: int
    sync_bytes: int
    """Bytes that one target receives in a sync."""
    samples: int
    forward_passes: float
    """Forward passes over all tokens of a step: old log-probs, and one for each model besides the actor."""
    epochs: int
    """Passes of training over a step's tokens, summed over all trained models."""
    longest: int
    """Most tokens of a row (prompt and response)."""
    longest_response: int
    backends: tuple[str, str, str]
    """Train backend, rollout backend, device."""

    def amounts(self, tokens_share: float, response_share: float) -> dict[str, float]:
        """Work of each phase, if rows have these shares of the largest length."""
        tokens = self.samples * self.longest * tokens_share * self.num_parameters
        responses = self.samples * self.longest_response * response_share * self.num_parameters
        return {
            "rollout": responses / self.rollout_devices,
            "sync": float(self.sync_bytes),
            "reward": float(self.samples),
            "log_probs": tokens * self.forward_passes / self.actor_devices,
            "update": tokens * self.epochs / self.actor_devices,
            "other": float(self.samples),
        }


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measured durations of a finished run."""

    run_dir: Path
    config: RunConfig
    seconds: Mapping[str, float]
    """Seconds by phase: median over its steps, without the first."""
    tokens_per_step: float
    response_tokens_mean: float
    num_steps: int


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Prediction for one step."""

    seconds: Mapping[str, float]
    """By phase."""
    notes: tuple[str, ...]
    """Differences from the calibrating run because of which rates may not hold."""

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())


def read_calibration(run_dir: Path, registry: Registry) -> Calibration:
    """Reads `config.yaml` and `metrics.jsonl` of a run's folder.

    Raises:
        ConfigError: they are missing, or contain fewer than two steps.
    """
    config_file = run_dir / "config.yaml"
    steps = [line for line in read_metrics(run_dir) if "time/step_s" in line]
    if not config_file.is_file() or len(steps) < 2:
        raise ConfigError(
            f"--calibration {str(run_dir)!r}: expected a run's folder with config.yaml and metrics.jsonl of two "
            f"steps or more (found {len(steps)}); make one with `rlsdk train --trainer.steps 5 ...`"
        )
    steady = steps[1:]
    names = sorted({key for line in steady for key in phase_names(line)})
    seconds = {
        name.removeprefix("time/").removesuffix("_s"): median(line.get(name, 0.0) for line in steady) for name in names
    }
    seconds.pop("eval", None)
    return Calibration(
        run_dir=run_dir,
        config=load_config([config_file], [], registry, sections=()),
        seconds=seconds,
        tokens_per_step=median(line["throughput/tokens_per_s"] * line["time/step_s"] for line in steady),
        response_tokens_mean=median(line["response/tokens_mean"] for line in steady),
        num_steps=len(steady),
    )


def forward_passes(config: RunConfig) -> float:
    """Number of forward passes without gradient over a step's tokens."""
    trainer, when = config.trainer, config.algorithm.old_log_probs
    if when == "rollout":
        old = 0.0
    elif when == "always" or trainer.epochs_per_step > 1:
        old = 1.0
    else:
        old = (trainer.updates_per_step - 1) / trainer.updates_per_step
    return old + sum(1 for role in roles(config) if not role.is_rollout and role.name != ACTOR)


def predict(work: Work, calibration: Calibration, measured: Work) -> Prediction:
    """Seconds of each phase at the rates of the calibrating run.

    Assumes the same row lengths relative to the largest length, and equal rates per device at any size; the notes say
    where this is doubtful.
    """
    tokens_share = calibration.tokens_per_step / (measured.samples * measured.longest)
    response_share = calibration.response_tokens_mean / measured.longest_response
    before, now = (w.amounts(tokens_share, response_share) for w in (measured, work))
    seconds: dict[str, float] = {}
    notes: list[str] = []
    for phase, took in calibration.seconds.items():
        name = phase if phase in now else "other"
        if before[name]:
            seconds[name] = seconds.get(name, 0.0) + took * now[name] / before[name]
        elif now[name]:
            notes.append(f"{phase}: the calibrating run did nothing of the kind, so its time is not predicted")
    return Prediction(seconds=seconds, notes=(*notes, *_differences(work, measured)))


def _differences(work: Work, measured: Work) -> Sequence[str]:
    said = [
        f"{what}: here {mine!r}, calibrated with {theirs!r}"
        for what, mine, theirs in zip(
            ("train backend", "rollout backend", "device"), work.backends, measured.backends, strict=True
        )
        if mine != theirs
    ]
    sizes: list[tuple[str, Callable[[Work], int]]] = [
        ("parameters", lambda w: w.num_parameters),
        ("devices of the actor", lambda w: w.actor_devices),
        ("devices of the rollout", lambda w: w.rollout_devices),
        ("samples in a step", lambda w: w.samples),
        ("tokens of the longest row", lambda w: w.longest),
    ]
    for what, of in sizes:
        mine, theirs = of(work), of(measured)
        if max(mine, theirs) > FAR * min(mine, theirs):
            said.append(f"{what}: here {mine:,}, calibrated with {theirs:,}")
    return said
