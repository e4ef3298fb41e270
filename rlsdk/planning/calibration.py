"""How long phases would take, from how long those of another run took: rates, nothing finer."""

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
"""A batch or a model of more than so many times that of the calibrating run is called far from it."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a step of a run does, in units that seconds are taken to be proportional to."""

    num_parameters: int
    actor_devices: int
    rollout_devices: int
    sync_bytes: int
    """That one target takes."""
    samples: int
    forward_passes: float
    """Over all of a step's tokens: old log-probs, and one for each model beside the actor."""
    epochs: int
    """Times that a step's tokens are trained on, by all trained models together."""
    longest: int
    """Tokens of a row, prompt and response, at most."""
    longest_response: int
    backends: tuple[str, str, str]
    """Train, rollout, device."""

    def amounts(self, tokens_share: float, response_share: float) -> dict[str, float]:
        """Work of each phase; rows have these shares of their longest."""
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
    """What a finished run took."""

    run_dir: Path
    config: RunConfig
    seconds: Mapping[str, float]
    """By phase: the median over its steps, the first one left out."""
    tokens_per_step: float
    response_tokens_mean: float
    num_steps: int


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Of one step."""

    seconds: Mapping[str, float]
    """By phase."""
    notes: tuple[str, ...]
    """Where this run is unlike the calibrating one, so that rates may not hold."""

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())


def read_calibration(run_dir: Path, registry: Registry) -> Calibration:
    """Reads `config.yaml` and `metrics.jsonl` of a run's folder.

    Raises:
        ConfigError: they are not there, or hold fewer than two steps.
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
    """Times that a step's tokens go through a model without gradient."""
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

    Rows are taken to be as long, as a share of the longest, as they were there. Rates are per device, and taken to be
    the same at any size: the notes say where that is far-fetched.
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
