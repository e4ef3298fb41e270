"""Rewards of a run out of its configuration: which functions, in which processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from rlsdk.config import RewardConfig, RewardLimitsConfig, RunConfig
from rlsdk.data import PromptDataset
from rlsdk.interfaces import ConfigError
from rlsdk.registry import ComponentKind, Registry
from rlsdk.rewards import CombinedScorer, RewardDef, RewardLimits, RewardRunner, Scorer, check_routes
from rlsdk.trainer.grading import RewardGrader


def resolve_rewards(rewards: Sequence[RewardConfig], registry: Registry) -> list[RewardDef]:
    """Registered names become import strings; everything else is a path to a function, looked up now so that a typo
    shows before any device is taken.

    Raises:
        ConfigError: one cannot be found.
    """
    return [reward_def(reward, _target(reward.name, registry)) for reward in rewards]


def reward_def(reward: RewardConfig, target: str) -> RewardDef:
    """The term of one entry of the configuration."""
    return RewardDef(
        name=reward.title, target=target, weight=reward.weight, options=dict(reward.options), rows=dict(reward.rows)
    )


def _target(name: str, registry: Registry) -> str:
    if ":" in name:
        return name
    registered = registry.target(ComponentKind.REWARD, name)
    if not isinstance(registered, str):
        raise ConfigError(
            f"rewards: {name!r} was registered as an object; it must be named as 'package.module:function', "
            "because rewards run in a process of their own"
        )
    return registered


def start_rewards(config: RunConfig, registry: Registry, log_dir: Path) -> Scorer | None:
    """What scores the samples of a run; imports of reward functions go on in the background. None: reward models alone
    score them.

    Raises:
        ConfigError: no reward at all, or one that cannot be found.
    """
    if not config.rewards:
        if config.reward_models:
            return None
        names = registry.usable(ComponentKind.REWARD)
        raise ConfigError(
            f"rewards: expected at least one; give --reward NAME with one of {names}, or file.py:function"
        )
    names = [reward.title for reward in config.rewards]
    runner = start_runner(config.rewards, config.reward_limits, registry, log_dir, is_whole=not config.reward_models)
    return CombinedScorer([runner], names, scored_elsewhere=True) if config.reward_models else runner


def start_runner(
    rewards: Sequence[RewardConfig],
    limits: RewardLimitsConfig,
    registry: Registry,
    log_dir: Path | None = None,
    *,
    is_whole: bool = True,
) -> RewardRunner:
    """Grading processes, that log in `log_dir`."""
    if log_dir is not None:
        log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    runner = RewardRunner(
        resolve_rewards(rewards, registry),
        grading_limits(limits),
        num_workers=limits.num_workers or max(1, min(8, (os.cpu_count() or 1) // 2)),
        log_path=None if log_dir is None else log_dir / "rewards.log",
        is_whole=is_whole,
    )
    runner.start()
    return runner


def check_rows(config: RunConfig, datasets: Sequence[PromptDataset]) -> None:
    """Compares the `rows` of rewards with the data.

    Raises:
        ConfigError: a field or a value that no row has, or rows that no reward is for.
    """
    rewards = [reward_def(reward, reward.name) for reward in config.rewards]
    rows = ((row.source, row.row) for dataset in datasets for row in dataset.rows)
    check_routes(rewards, rows, whole=not config.reward_models)


def grading_limits(asked: RewardLimitsConfig) -> RewardLimits:
    """What grading processes are held to."""
    return RewardLimits(
        timeout_s=asked.timeout_s,
        memory_mb=asked.memory_mb,
        start_timeout_s=asked.start_timeout_s,
        batched_timeout_s=asked.batched_timeout_s,
        batch_timeout_s=asked.batch_timeout_s,
        max_batch_samples=asked.max_batch_samples,
        max_losses_in_a_row=asked.max_losses_in_a_row,
        max_attempts=asked.max_attempts,
        max_value=asked.max_value,
        max_record_bytes=asked.max_record_bytes,
        max_metrics=asked.max_metrics,
        log_mb=asked.log_mb,
        allow_network=asked.allow_network,
        allow_writes=asked.allow_writes,
        isolation=asked.isolation,
        environment=asked.environment,
    )


def reward_grader(config: RunConfig, scorer: Scorer, notice: Callable[[str], None]) -> RewardGrader:
    """What the stream asks; `notice` receives what happened to the rewards."""
    asked = config.reward_limits.on_failure
    return RewardGrader(scorer, notice, failed_score=None if asked == "drop" else asked)
