"""The scorers and judges of a run: those of training, and those of evaluation sets with rewards of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from rlsdk.config import Measure, RewardConfig, RunConfig
from rlsdk.registry import Registry
from rlsdk.rewards import Scorer
from rlsdk.trainer.inputs.judges import EngineJudge
from rlsdk.trainer.inputs.rewards import load_judges, start_rewards


@dataclass(frozen=True, kw_only=True)
class RunRewards:
    """The scorers and judges of a run's samples."""

    train: Scorer | None = None
    """Scorer for training, and for evaluation sets without rewards of their own; None: nothing is graded."""
    sets: Mapping[str, Scorer] = field(default_factory=dict)
    """Scorers by name of the evaluation set; sets with equal rewards share one."""
    judges: Mapping[str, EngineJudge] = field(default_factory=dict)
    """Judge engines of the run, by role; they answer once they are connected."""

    def wait_ready(self) -> None:
        """Blocks until all reward functions are loaded.

        Raises:
            ConfigError: one cannot be loaded.
        """
        for runner in self._runners:
            runner.wait_ready()

    def close(self) -> None:
        with ExitStack() as stack:  # closes each, even if another fails
            for runner in self._runners:
                stack.callback(runner.close)

    @property
    def _runners(self) -> list[Scorer]:
        return list({id(runner): runner for runner in (self.train, *self.sets.values()) if runner is not None}.values())


def start_run_rewards(
    config: RunConfig, registry: Registry, log_dir: Path, measures: Sequence[Measure], *, train: bool = True
) -> RunRewards:
    """Starts the grading processes; their imports continue in the background.

    Args:
        config: the run's configuration.
        registry: the installed backends and components.
        log_dir: folder for the output of rewards.
        measures: the evaluation measures.
        train: start the training rewards even if no evaluation set uses them.

    Raises:
        ConfigError: a reward cannot be found, or there are no rewards.
    """
    own: list[tuple[Sequence[RewardConfig], Scorer]] = []
    sets: dict[str, Scorer] = {}
    with ExitStack() as started:  # on an error, closes those that were started
        for measure in measures:
            rewards = measure.config.rewards
            if not rewards:
                train = True
                continue
            runner = next((known for same, known in own if same == rewards), None)
            if runner is None:
                runner = start_rewards(rewards, config.reward_limits, registry, log_dir / f"eval-{measure.name}")
                started.callback(runner.close)
                own.append((rewards, runner))
            sets[measure.name] = runner
        judges = load_judges(config) if train else {}
        training = _of_training(config, registry, log_dir, judges) if train else None
        started.pop_all()
    return RunRewards(train=training, sets=sets, judges=judges)


def _of_training(
    config: RunConfig, registry: Registry, log_dir: Path, judges: Mapping[str, EngineJudge]
) -> Scorer | None:
    """The scorer of training; None if no reward is graded: reward models, an environment or an agent alone score the
    samples, or teachers teach them."""
    if not config.rewards and (config.rollout.brings_score or not config.rewards_are_whole):
        return None
    elsewhere = not config.rewards_are_whole
    return start_rewards(
        config.rewards, config.reward_limits, registry, log_dir, scored_elsewhere=elsewhere, judges=judges
    )
