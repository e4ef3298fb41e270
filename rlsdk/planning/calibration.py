"""Predicts durations of phases from those of another run, by rates only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rlsdk.config import RunConfig, StepPasses, comparable_log_probs, load_config, roles, step_passes
from rlsdk.config.checks.declared import declared_fields
from rlsdk.interfaces import BackendKind, ConfigError
from rlsdk.interfaces.spelling import as_given
from rlsdk.planning.rates import FORWARD_SPEEDUP
from rlsdk.registry import Registry
from rlsdk.trainer.tracking.step_times import has_own_time, phase_names
from rlsdk.trainer.tracking.trackers import read_metrics

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
    forward_passes: int
    """Forward passes without gradient over all tokens of a step."""
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
    steps = [line for line in read_metrics(run_dir) if "time/step_s" in line and has_own_time(line)]
    if not config_file.is_file() or len(steps) < 2:
        raise ConfigError(
            f"{as_given('calibration', str(run_dir))}: expected a run's folder with config.yaml and "
            f"metrics.jsonl of two steps or more (found {len(steps)}); make one with "
            "`rlsdk train --trainer.steps 5 ...`"
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


def planned_passes(
    config: RunConfig, registry: Registry, *, stale: bool | None = None, reads: Sequence[str] | None = None
) -> StepPasses:
    """The forward passes of a step in full swing, as the learner will make them.

    Args:
        config: a run that was checked.
        registry: what is installed.
        stale: whether its samples are; None: as its schedule says.
        reads: fields of the batch that its functions declare; None: they are imported and asked.
    """
    kind = registry.backend(BackendKind.ROLLOUT, config.rollout.backend).log_prob_kind
    return step_passes(
        config,
        stale=config.schedule.overlaps if stale is None else stale,
        comparable=comparable_log_probs(kind, config.rollout),
        reads=declared_fields(config, registry) if reads is None else reads,
    )


def training_work(config: RunConfig, passes: StepPasses, num_trained: int) -> float:
    """Work of a step's training, in forward passes over its tokens: log-probs and updates of all trained models."""
    return len(passes.passes) + FORWARD_SPEEDUP * config.trainer.epochs_per_step * num_trained


def stale_work(config: RunConfig, registry: Registry) -> float:
    """Training work of a step on stale samples, in units of that of a synchronous step of the same run."""
    num_trained = sum(role.is_trained for role in roles(config))
    stale, fresh = (
        training_work(config, planned_passes(config, registry, stale=stale), num_trained) for stale in (True, False)
    )
    return stale / fresh


def predict(work: Work, calibration: Calibration, measured: Work) -> Prediction:
    """Seconds of each phase at the rates of the calibrating run.

    Assumes the same row lengths relative to the largest length, and equal rates per device at any size; the notes say
    where this is doubtful. Forward passes that the calibrating run did not make are taken from its updates.
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
        elif now[name] and name == "log_probs":
            seconds[name] = calibration.seconds.get("update", 0.0) * now[name] / (FORWARD_SPEEDUP * before["update"])
            notes.append(
                f"{phase}: the calibrating run made no forward pass without gradient; each is taken for a third of its "
                "updates' time over the same tokens"
            )
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
