"""Builds the stream of a run, and the evaluations that use it, from the configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rlsdk.config import EvalSetConfig, RunConfig
from rlsdk.data import PromptDataset
from rlsdk.interfaces import (
    ENVIRONMENT_REWARD,
    BackendKind,
    Capability,
    LogProbKind,
    Rollouter,
    RolloutSpec,
    SamplingParams,
)
from rlsdk.registry import ComponentKind, Registry
from rlsdk.rollouts import Restarts, RolloutStream, StreamOptions
from rlsdk.trainer.generation.replicas import CallsRanks, replicas_of
from rlsdk.trainer.inputs.agents import agent_rollouter
from rlsdk.trainer.inputs.codec import TokenCodec
from rlsdk.trainer.inputs.environments import environment_rollouter
from rlsdk.trainer.inputs.grading import RewardGrader
from rlsdk.trainer.inputs.judges import EngineJudge
from rlsdk.trainer.inputs.rewards import reward_grader
from rlsdk.trainer.inputs.run_rewards import RunRewards
from rlsdk.trainer.stages.evaluation.run import EvalSet, Evaluation, Judge
from rlsdk.trainer.stages.evaluation.settings import eval_sampling, samples_whole_distribution

if TYPE_CHECKING:
    from rlsdk.trainer.roles.session import Session


def open_stream(
    config: RunConfig,
    registry: Registry,
    group: CallsRanks,
    tokenizer: Any,
    rewards: RunRewards | None = None,
    notice: Callable[[str], None] = print,
    restarts: Restarts | None = None,
    rollouter: Rollouter | None = None,
) -> RolloutStream:
    """Opens the stream over all replicas of a rollout group. `notice` receives messages about the rewards; `restarts`
    restarts lost replicas; `rollouter` stands in for that of the run."""
    rollout, rewards = config.rollout, rewards or RunRewards()
    spec = registry.backend(BackendKind.ROLLOUT, rollout.backend)
    return RolloutStream(
        replicas_of(
            group,
            backend=rollout.backend,
            max_running=rollout.max_running_samples,
            keeps_unfinished=Capability.PARTIAL_ROLLOUT in spec.capabilities,
        ),
        TokenCodec(tokenizer),
        StreamOptions(
            rollout=rollouter or rollouter_of(config, registry, tokenizer),
            rollout_options=options_of(config),
            brings_score=rollout.brings_score,
            max_model_tokens=config.max_model_tokens,
            progress_s=config.deadlines.rollout_s,
            adapts_concurrency=config.adapts_concurrency,
        ),
        grader=None if rewards.train is None else reward_grader(config, rewards.train, notice),
        graders={f"eval/{name}": RewardGrader(runner, notice) for name, runner in rewards.sets.items()},
        restarts=restarts,
    )


def connect_judges(judges: Mapping[str, EngineJudge], session: Session, progress_s: float) -> None:
    """Connects the judges that are engines of the run to their replicas."""
    for role, judge in judges.items():
        group = session[role]
        spec = group.role.spec
        assert isinstance(spec, RolloutSpec)
        judge.connect(
            replicas_of(group.group, backend=group.role.backend, max_running=spec.max_running), progress_s=progress_s
        )


def evaluation_of(
    config: RunConfig,
    prompts: Mapping[str, PromptDataset],
    sampling: SamplingParams,
    stream: RolloutStream,
    kind: LogProbKind,
    judge: Judge | None = None,
) -> Evaluation | None:
    """Builds the evaluation; None if there are no evaluation prompts.

    Args:
        config: configuration of the run.
        prompts: prompts by name of the measure.
        sampling: sampling parameters of training; an evaluation uses their stop tokens and limits, and its own filters.
        stream: samples and grades the prompts.
        kind: kind of the rollout engine's log-probs.
        judge: chooses the best of several samples.
    """
    if not prompts:
        return None
    return Evaluation(
        stream=stream,
        sets=[
            EvalSet(
                measure=measure,
                prompts=prompts[measure.name],
                sampling=eval_sampling(measure.config, sampling),
                reward_names=reward_names(config, measure.config),
                has_whole_score=bool(measure.config.rewards) or not config.reward_models,
                has_entropy=samples_whole_distribution(measure.config, kind),
            )
            for measure in config.eval.measures()
            if measure.name in prompts
        ],
        seed=config.trainer.seed,
        max_failure_share=config.reward_limits.max_failure_share,
        judge=judge,
    )


def reward_names(config: RunConfig, part: EvalSetConfig) -> list[str]:
    """Names of what scores the samples of an evaluation set, in order: the first that applies decides correctness."""
    own = [ENVIRONMENT_REWARD] if config.rollout.brings_score else []
    return [*(reward.title for reward in part.rewards), *own] if part.rewards else config.reward_titles


def options_of(config: RunConfig) -> Mapping[str, Any]:
    """Keyword arguments of what makes the samples."""
    rollout = config.rollout
    if rollout.has_agent:
        return rollout.agent_options
    return rollout.rollouter_options if rollout.environment is None else rollout.environment_options


def rollouter_of(config: RunConfig, registry: Registry, tokenizer: Any) -> Rollouter:
    """The rollouter of a run: the one that is named, the loop that plays its environment, or the gateway of
    its agent."""
    rollout = config.rollout
    if rollout.has_agent:
        spec = registry.backend(BackendKind.ROLLOUT, rollout.backend)
        return agent_rollouter(config, tokenizer, supports_stop=Capability.STOP_STRINGS in spec.capabilities)
    if rollout.environment is None:
        return build_rollouter(rollout.rollouter, registry)
    return environment_rollouter(config, tokenizer)


def build_rollouter(name: str, registry: Registry) -> Rollouter:
    """Loads a registered rollouter, `pkg.mod:fn`, or `file.py:fn`.

    Raises:
        ConfigError: it does not exist, or it cannot be loaded.
    """
    rollouter: Rollouter = registry.function(ComponentKind.ROLLOUTER, name)
    return rollouter
