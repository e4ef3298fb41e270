"""Builds a run's rewards from its configuration: which functions, in which processes."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlsdk.config import JudgeConfig, Measure, RemoteRewardConfig, RewardConfig, RewardLimitsConfig, RunConfig
from rlsdk.config.sections.role_kinds import judge_role
from rlsdk.data import PromptDataset
from rlsdk.interfaces import ConfigError
from rlsdk.interfaces.settings import JudgeSettings, RequestSettings, shared
from rlsdk.interfaces.spelling import Setting
from rlsdk.registry import ComponentKind, Registry
from rlsdk.rewards import CombinedScorer, RewardDef, RewardRunner, Scorer, check_routes
from rlsdk.rewards.services.http_client import RemoteOptions
from rlsdk.rewards.services.judge import JudgeClient, JudgeOptions
from rlsdk.rewards.services.remote import RemoteScorer
from rlsdk.trainer.inputs.grading import RewardGrader
from rlsdk.trainer.inputs.judges import EngineJudge
from rlsdk.trainer.inputs.reward_preflight import check_gradable


def resolve_rewards(rewards: Sequence[RewardConfig], registry: Registry) -> list[RewardDef]:
    """Converts registered names to import strings; everything else is the path of a function, which is looked up now so
    that a typo is found before any device is used.

    Raises:
        ConfigError: a reward cannot be found.
    """
    return [reward_def(reward, _target(reward.name, registry)) for reward in rewards]


def reward_def(reward: RewardConfig, target: str) -> RewardDef:
    """The reward definition of one entry of the configuration."""
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


def start_rewards(
    rewards: Sequence[RewardConfig],
    limits: RewardLimitsConfig,
    registry: Registry,
    log_dir: Path,
    *,
    scored_elsewhere: bool = False,
    judges: Mapping[str, EngineJudge] = MappingProxyType({}),
) -> Scorer:
    """Starts the scorer of samples; imports of reward functions continue in the background.

    Args:
        rewards: rewards of a run, or of an evaluation set.
        limits: limits on all of them.
        registry: the installed backends and components.
        log_dir: folder for the output of rewards.
        scored_elsewhere: reward models score the samples, too, so that a sample to which no reward applies has not
            failed.
        judges: judges that are engines of the run, by role.

    Raises:
        ConfigError: there is no reward, or a reward cannot be found or does not answer.
    """
    if not rewards:
        names = registry.usable(ComponentKind.REWARD)
        raise ConfigError(
            f"rewards: expected at least one; give {Setting('rewards', 'NAME')} with one of {names}, or "
            "file.py:function"
        )
    local = [reward for reward in rewards if not reward.is_remote]
    remote = [reward for reward in rewards if reward.is_remote]
    if not remote and not scored_elsewhere:
        return start_runner(local, limits, registry, log_dir)
    parts: list[Scorer] = []
    try:
        parts += [start_runner(local, limits, registry, log_dir, is_whole=False)] if local else []
        for reward in remote:
            parts.append(start_remote(reward, limits, judges))
    except BaseException:
        for part in parts:
            part.close()
        raise
    return CombinedScorer(parts, [reward.title for reward in rewards], scored_elsewhere=scored_elsewhere)


def start_remote(
    reward: RewardConfig, limits: RewardLimitsConfig, judges: Mapping[str, EngineJudge] = MappingProxyType({})
) -> RemoteScorer:
    """Starts a reward that calls a service or a judge, after it has answered once.

    Raises:
        ConfigError: it does not answer, its URL is invalid, or an environment variable is not set.
    """
    if reward.judge is not None and reward.judge.engine is not None:
        judge = judges.get(judge_role(reward.label))
        if judge is None:
            raise ConfigError(
                f"rewards: the judge {reward.title!r} is an engine of training, which evaluation sets and this command "
                "do not have; name a service in judge.url"
            )
        options = RemoteOptions(batch_size=32, max_concurrent=1024)  # The client of the replicas has the queue.
        return RemoteScorer(reward_def(reward, judge.name), options, limits, lambda url, given: judge)
    asked = reward.remote or RemoteRewardConfig()
    headers = secret_headers(asked.token_env, asked.headers_from_env)
    options = RemoteOptions(**shared(asked, RequestSettings), headers=headers)
    if reward.judge is None or reward.judge.url is None:
        scorer = RemoteScorer(reward_def(reward, reward.name), options, limits)
    else:
        make = functools.partial(JudgeClient, judge=judge_options(reward.judge))
        alone = replace(options, batch_size=1, batch_wait_s=0.0)  # One question is one request.
        scorer = RemoteScorer(reward_def(reward, reward.judge.url), alone, limits, make)
    if asked.check_at_start:
        try:
            scorer.check()
        except BaseException:
            scorer.close()
            raise
    return scorer


def load_judges(config: RunConfig) -> dict[str, EngineJudge]:
    """The judges that are engines of the run, by role; not connected yet.

    Raises:
        ConfigError: a judge has no tokenizer, or no room for a question.
    """
    return {
        judge_role(reward.label): EngineJudge(
            judge_role(reward.label), judge_options(reward.judge), reward.judge.engine, config.model
        )
        for reward in config.rewards
        if reward.judge is not None and reward.judge.engine is not None
    }


def judge_options(asked: JudgeConfig) -> JudgeOptions:
    """The judge's question template, and how its verdict is read."""
    return JudgeOptions(model=asked.model or "", choices=asked.choices, **shared(asked, JudgeSettings))


def secret_headers(token_env: str | None, headers_from_env: Mapping[str, str]) -> dict[str, str]:
    """Headers whose values the environment holds.

    Raises:
        ConfigError: a variable is not set, or its value is invalid in a header; names it but never its value.
    """
    found = {header: secret_from_env(name) for header, name in headers_from_env.items()}
    return found if token_env is None else {**found, "Authorization": f"Bearer {secret_from_env(token_env)}"}


def secret_from_env(name: str) -> str:
    """The value of an environment variable, which must be valid in a header.

    Raises:
        ConfigError: it is not set, or invalid; names it but never its value.
    """
    value = os.environ.get(name, "")
    if not value:
        raise ConfigError(f"environment variable {name!r} is not set; set it to the secret that the service expects")
    if not value.isascii() or not value.isprintable() or value != value.strip():
        raise ConfigError(f"environment variable {name!r}: expected printable ASCII without blanks at its ends")
    return value


def start_runner(
    rewards: Sequence[RewardConfig],
    limits: RewardLimitsConfig,
    registry: Registry,
    log_dir: Path | None = None,
    *,
    is_whole: bool = True,
) -> RewardRunner:
    """Starts grading processes, which log to `log_dir`."""
    if log_dir is not None:
        log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    runner = RewardRunner(
        resolve_rewards(rewards, registry),
        limits,
        num_workers=limits.num_workers or max(1, min(8, (os.cpu_count() or 1) // 2)),
        log_path=None if log_dir is None else log_dir / "rewards.log",
        is_whole=is_whole,
    )
    runner.start()
    return runner


def check_rows(
    config: RunConfig,
    registry: Registry,
    train: PromptDataset,
    sets: Mapping[str, PromptDataset],
    measures: Sequence[Measure],
) -> list[str]:
    """Checks rewards, and their `rows`, against the data that they grade. Returns notices.

    Raises:
        ConfigError: no row has a field or value that `rows` names, no reward applies to some rows, or a reward can
            grade no row.
    """
    own = {measure.name: measure.config.rewards for measure in measures if measure.config.rewards}
    shared = [train, *(dataset for name, dataset in sets.items() if name not in own)]
    whole = config.rewards_are_whole and not config.rollout.brings_score
    check_routes(_defs(config.rewards), _rows(shared), whole=whole)
    notices = check_gradable(config.rewards, [row for part in shared for row in part.rows], registry)
    for name, rewards in own.items():
        if name in sets:
            field = f"rewards of evaluation {name!r}"
            check_routes(_defs(rewards), _rows([sets[name]]), whole=True, field=field)
            notices += check_gradable(rewards, sets[name].rows, registry, field=field)
    return notices


def _defs(rewards: Sequence[RewardConfig]) -> list[RewardDef]:
    return [reward_def(reward, reward.name) for reward in rewards]


def _rows(datasets: Sequence[PromptDataset]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    return ((row.source, row.row) for dataset in datasets for row in dataset.rows)


def reward_grader(config: RunConfig, scorer: Scorer, notice: Callable[[str], None]) -> RewardGrader:
    """The grader for the stream; `notice` receives messages about the rewards."""
    asked = config.reward_limits.on_failure
    return RewardGrader(scorer, notice, failed_score=None if asked == "drop" else asked)
