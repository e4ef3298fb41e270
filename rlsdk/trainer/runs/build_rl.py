"""Builds the reinforcement learning stage from the configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from rlsdk.config import RunConfig, choose_old_log_probs, comparable_log_probs, samples_by_version
from rlsdk.config.sections.role_kinds import reward_role, teacher_role
from rlsdk.data import PromptStream, special_ids
from rlsdk.interfaces import Algorithm, BackendKind, Trajectory
from rlsdk.kit.model.hf import model_vocabulary
from rlsdk.registry import Registry
from rlsdk.rollouts import RolloutStream
from rlsdk.rollouts.groups.rollouter import without_stop
from rlsdk.rollouts.journal.journal import FOLDER
from rlsdk.trainer.generation.group_source import GroupSource
from rlsdk.trainer.generation.history import History
from rlsdk.trainer.generation.publishing import BlockingPublisher, OverlappedPublisher, Publisher
from rlsdk.trainer.generation.replicas import replicas_of
from rlsdk.trainer.generation.sampler import Draw, compared_scores
from rlsdk.trainer.inputs.codec import TokenCodec
from rlsdk.trainer.inputs.grading import CorrectRule
from rlsdk.trainer.inputs.prompt_scorers import EngineScorer, PromptScorer, ServiceScorer
from rlsdk.trainer.inputs.step_ends import StepReader
from rlsdk.trainer.inputs.teachers import Taught
from rlsdk.trainer.learner.algorithm import build_algorithm
from rlsdk.trainer.learner.learner import LearnerOptions, PolicyLearner
from rlsdk.trainer.learner.state import TrainerState
from rlsdk.trainer.learner.watch import repeated_notice, setting_notices
from rlsdk.trainer.roles.fleet import Fleet, fleet_of
from rlsdk.trainer.roles.policy_average import PolicyAverage
from rlsdk.trainer.roles.ranks import RememberedLayouts
from rlsdk.trainer.roles.serving import ServedWeights
from rlsdk.trainer.roles.session import sharding_manager
from rlsdk.trainer.runs.build_stream import connect_judges, evaluation_of, open_stream
from rlsdk.trainer.runs.made_by import made_by
from rlsdk.trainer.runs.run_inputs import RunInputs
from rlsdk.trainer.stages.evaluation.settings import eval_options, samples_whole_distribution
from rlsdk.trainer.stages.rl import RlOptions, RlStage
from rlsdk.trainer.stages.stage import StageSettings
from rlsdk.trainer.tracking.pool_times import FILE as TIMES_FILE
from rlsdk.trainer.tracking.samples import SampleLog

if TYPE_CHECKING:
    from rlsdk.trainer.roles.session import Session
    from rlsdk.trainer.tracking.events import RunView


def rl_stage(
    config: RunConfig,
    registry: Registry,
    run_inputs: RunInputs,
    session: Session,
    algorithm: Algorithm | None = None,
) -> RlStage:
    """Builds the reinforcement learning stage on a running session; `algorithm`: None: built now."""
    view = run_inputs.output.view
    by_version = samples_by_version(config, session.rollout.spec.capabilities)
    fleet = _fleet(config, registry, session, view, by_version=by_version)
    weights = fleet or ServedWeights(session, timeout_s=config.deadlines.sync_s)
    stream = open_stream(
        config, registry, session.rollout.group, run_inputs.tokenizer, run_inputs.rewards, view.notice, fleet
    )
    connect_judges(run_inputs.rewards.judges, session, config.deadlines.rollout_s)
    state = TrainerState()
    if repeated := repeated_notice(config.trainer, len(run_inputs.train_prompts)):
        view.notice(repeated)
    for notice in setting_notices(config, registry):
        view.notice(notice)
    publisher = _publisher(config, session, weights, stream, state, view, by_version=by_version)
    algorithm = algorithm or algorithm_of(config, registry, run_inputs)
    evaluate = evaluation_of(
        config, run_inputs.eval_prompts, run_inputs.sampling, stream, session.rollout.spec.log_prob_kind
    )
    return RlStage(
        _source(config, registry, run_inputs, stream, publisher, algorithm, session, by_version=by_version),
        PolicyLearner(session, algorithm, learner_options(config, run_inputs, session), state, view),
        publisher,
        evaluate,
        run_inputs.output,
        _options(config, registry, run_inputs),
        _settings(config),
        state,
        eval_options(config),
        _average(config, session),
    )


def _source(
    config: RunConfig,
    registry: Registry,
    run_inputs: RunInputs,
    stream: RolloutStream,
    publisher: Publisher,
    algorithm: Algorithm,
    session: Session,
    *,
    by_version: bool,
) -> GroupSource:
    """Builds the source of each step's groups."""
    longest = config.rollout.max_response_tokens
    return GroupSource(
        stream,
        prompts_of(config, run_inputs),
        draw_of(algorithm, run_inputs),
        groups_per_step=config.trainer.prompts_per_step,
        steps=config.trainer.steps,
        seed=config.trainer.seed,
        publisher=publisher,
        schedule=config.schedule,
        accept=lambda group: any(
            map(algorithm.accepts, compared_scores(group, config.algorithm.lengths, max_tokens=longest))
        ),
        max_groups_per_step=algorithm.max_groups,
        history=_history(config, registry, run_inputs, vocabulary_of(session, run_inputs)),
        times=run_inputs.output.run_dir / TIMES_FILE,
        by_version=by_version,
    )


def _options(config: RunConfig, registry: Registry, run_inputs: RunInputs) -> RlOptions:
    kind = registry.backend(BackendKind.ROLLOUT, config.rollout.backend).log_prob_kind
    old = choose_old_log_probs(
        config.algorithm,
        stale=config.schedule.overlaps,
        num_updates=config.trainer.updates_per_step * config.trainer.epochs_per_step,
        comparable=comparable_log_probs(kind, config.rollout),
    )
    return RlOptions(
        has_entropy=samples_whole_distribution(config.rollout, kind),
        accounts_for_sampler=old.accounts_for_sampler,
        correct=CorrectRule(reward=config.eval.correct_reward, least=config.eval.correct_from),
        temperature=config.rollout.temperature,
        reward_names=config.reward_titles,
        max_failure_share=config.reward_limits.max_failure_share,
        special=special_ids(run_inputs.tokenizer) - set(run_inputs.ends.stops),
        shown_samples=SampleLog(
            count=config.tracking.samples_per_step,
            max_tokens=config.tracking.tokens_per_sample,
            pieces=TokenCodec(run_inputs.tokenizer).pieces,
        ),
        max_staleness=config.schedule.max_staleness,
        preempt_s=config.faults.preempt_s,
    )


def _settings(config: RunConfig) -> StageSettings:
    return StageSettings(
        steps=config.trainer.steps,
        save_every=config.trainer.save_every_steps,
        saves_last=True,
        folder="checkpoints",
        exports=True,
        export_every=config.trainer.export_every_steps,
    )


def _average(config: RunConfig, session: Session) -> PolicyAverage | None:
    """The moving average of the policy's weights; None if not configured."""
    if (decay := config.train.ema_decay) is None:
        return None
    deadlines = config.deadlines
    return PolicyAverage(session, decay, timeout_s=deadlines.save_s, update_timeout_s=deadlines.update_s)


def _fleet(config: RunConfig, registry: Registry, session: Session, view: RunView, *, by_version: bool) -> Fleet | None:
    """The fleet that restarts lost replicas; None where they cannot be restarted."""
    actor = replace(session.actor, group=RememberedLayouts(session.actor.group))
    timeout_s = config.deadlines.sync_s
    return fleet_of(
        session,
        lambda rollout: sharding_manager(config.sharding, registry, actor, rollout, timeout_s=timeout_s),
        max_restarts=config.faults.replica_restarts,
        keeps_copy=config.schedule.overlaps,
        drains=config.schedule.on_new_weights == "drain" and not by_version,
        timeout_s=timeout_s,
        notice=view.notice,
        num_versions=config.schedule.max_staleness + 1 if by_version else 1,
    )


def algorithm_of(config: RunConfig, registry: Registry, run_inputs: RunInputs) -> Algorithm:
    """The run's algorithm."""
    kind = registry.backend(BackendKind.ROLLOUT, config.rollout.backend).log_prob_kind
    comparable = comparable_log_probs(kind, config.rollout)
    return build_algorithm(config, registry, comparable=comparable, examples=run_inputs.examples)


def prompts_of(config: RunConfig, run_inputs: RunInputs) -> PromptStream:
    """The training prompts in the run's order, from the first one on."""
    return PromptStream(run_inputs.train_prompts, seed=config.trainer.seed, shuffle=config.data.shuffle)


def draw_of(algorithm: Algorithm, run_inputs: RunInputs) -> Draw:
    """The sampling settings of training groups."""
    return Draw(
        source="train",
        num_samples=algorithm.num_samples,
        sampling=run_inputs.sampling,
        greedy_baseline=algorithm.greedy_baseline,
    )


def text_of(run_inputs: RunInputs) -> Callable[[Trajectory], str]:
    """Returns a function that gives the text of a trajectory as the rewards saw it."""
    codec, stops = TokenCodec(run_inputs.tokenizer), run_inputs.sampling.stop_token_ids
    return lambda trajectory: codec.decode(without_stop(trajectory.response_ids, stops))


def vocabulary_of(session: Session, run_inputs: RunInputs) -> int:
    """Number of token ids that samples of the policy may have."""
    return max(model_vocabulary(session.actor.role.model), len(run_inputs.tokenizer))


def _history(config: RunConfig, registry: Registry, run_inputs: RunInputs, vocabulary: int) -> History:
    if config.schedule.journal == "none":
        return History()
    return History(
        run_inputs.output.run_dir / FOLDER,
        made_by=made_by(config, registry, run_inputs),
        keep=config.schedule.keeps,
        text_of=text_of(run_inputs),
        vocabulary=vocabulary,
        notice=run_inputs.output.view.notice,
    )


def _publisher(
    config: RunConfig,
    session: Session,
    weights: ServedWeights,
    stream: RolloutStream,
    state: TrainerState,
    view: RunView,
    *,
    by_version: bool,
) -> Publisher:
    """Builds what publishes weights to the replicas: between steps, or while the next step trains."""
    exact = session.actor.role.model.dtype == "float32"
    if not config.schedule.overlaps:
        return BlockingPublisher(weights, session.turns, stream, state, view, expects_change=exact)
    return OverlappedPublisher(
        weights,
        session.turns,
        stream,
        state,
        view,
        expects_change=exact,
        on_new_weights=config.schedule.on_new_weights,
        timeout_s=config.deadlines.sync_s,
        by_version=by_version,
    )


def learner_options(config: RunConfig, run_inputs: RunInputs, session: Session) -> LearnerOptions:
    """The options of a run's learner."""
    return LearnerOptions(
        reward_weights={reward_role(model.name): model.weight for model in config.reward_models},
        step_readers={
            reward_role(model.name): StepReader(
                tokenizer=run_inputs.tokenizer, separator=model.step_separator, stops=run_inputs.ends.stops
            )
            for model in config.reward_models
            if model.step_scores is not None
        },
        taught=Taught.of_run(config, run_inputs.train_prompts, run_inputs.tokenizer),
        exact_teachers=[teacher_role(one.name) for one in config.teachers] if config.learns_exactly else [],
        scorers=_scorers(config, session),
        update_timeout_s=config.deadlines.update_s,
        parity_threshold=config.trainer.parity_threshold,
        parity_is_error=config.trainer.parity_action == "error",
    )


def _scorers(config: RunConfig, session: Session) -> dict[str, PromptScorer]:
    """By role, the teachers that are rollout engines of the session, or services."""
    found: dict[str, PromptScorer] = {}
    for teacher in config.teachers:
        role = teacher_role(teacher.name)
        if teacher.url is not None:
            found[role] = ServiceScorer.of(teacher)
        elif teacher.rollout is not None:
            group = session[role]
            replicas = replicas_of(group.group, backend=group.backend, max_running=teacher.rollout.max_running_samples)
            found[role] = EngineScorer(role, replicas, progress_s=config.deadlines.rollout_s)
    return found
