"""Stages out of a configuration: the one place that takes the whole of it apart."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsdk.algorithms import DpoObjective, RewardModelObjective
from rlsdk.config import Measure, PairTraining, RunConfig, comparable_log_probs
from rlsdk.config.evaluation import HELD_OUT
from rlsdk.data import Prompt, PromptDataset, PromptStream
from rlsdk.interfaces import (
    Algorithm,
    BackendKind,
    Capability,
    ConfigError,
    Example,
    LogProbKind,
    RolloutSpec,
    SamplingParams,
    SyncReport,
    Trajectory,
)
from rlsdk.registry import Registry
from rlsdk.rollouts import RolloutStream, StreamOptions, request_seed
from rlsdk.rollouts.journal import FOLDER
from rlsdk.rollouts.rollouter import without_stop
from rlsdk.trainer.average import PolicyAverage
from rlsdk.trainer.checkpoint import step_of
from rlsdk.trainer.eval_parts import RunRewards, eval_sampling, samples_whole_distribution, start_run_rewards
from rlsdk.trainer.evaluation import EvalSet, Evaluation
from rlsdk.trainer.evaluations import EvalOptions
from rlsdk.trainer.grading import RewardGrader
from rlsdk.trainer.judges import EngineJudge
from rlsdk.trainer.pairs import PairSet, PairSettings, encode_pairs
from rlsdk.trainer.parts import (
    build_algorithm,
    build_callbacks,
    build_rollouter,
    build_trackers,
    load_run_tokenizer,
    sampling_params,
)
from rlsdk.trainer.phases import RolloutPhase
from rlsdk.trainer.policy import LearnerOptions, PolicyLearner
from rlsdk.trainer.preferences import PairOptions, PairStage
from rlsdk.trainer.publishing import OverlappedPublisher, Publisher, TurnsPublisher
from rlsdk.trainer.replicas import CallsRanks, replicas_of
from rlsdk.trainer.reward_sources import check_rows, reward_grader
from rlsdk.trainer.rl import RlOptions, RlStage
from rlsdk.trainer.run_data import load_examples, load_prompts, with_pair_steps, with_sft_steps, with_steps
from rlsdk.trainer.sampler import Draw, scores_of
from rlsdk.trainer.sft import CHECKPOINTS, AnswerSettings, Learned, SftStage, learned_answers
from rlsdk.trainer.source import GroupSource
from rlsdk.trainer.stage import RunOutput, StageSettings
from rlsdk.trainer.state import TrainerState
from rlsdk.trainer.text import TokenCodec

if TYPE_CHECKING:
    from rlsdk.trainer.events import RunView
    from rlsdk.trainer.session import Session


@dataclass(frozen=True, kw_only=True)
class Materials:
    """What can be made, and can fail, before a worker exists. Nothing in it owns a device."""

    config: RunConfig
    """With the number of steps that its epochs come to."""
    tokenizer: Any
    train_prompts: PromptDataset
    eval_prompts: Mapping[str, PromptDataset]
    """By name of the measure; none where nothing is measured."""
    examples: Sequence[Example]
    """Of the supervised term, where there is one."""
    learned: Learned | None
    """Prompts of supervised training, and the tokens that are learned behind each; None: there is none."""
    rewards: RunRewards
    sampling: SamplingParams
    """Of training."""
    output: RunOutput

    def close(self) -> None:
        self.rewards.close()
        self.output.close()


def build_materials(
    config: RunConfig,
    registry: Registry,
    run_dir: Path,
    view: RunView,
    *,
    rewarded: bool = True,
    supervised: bool = True,
    resume: Path | None = None,
) -> Materials:
    """Starts the grading processes first: their imports go on while data is read. Supervised training needs none.

    Args:
        config: of the run.
        registry: of what is installed.
        run_dir: the run's folder.
        view: is told what was left out of the data.
        rewarded: samples are graded.
        supervised: supervised training comes first, where `sft` asks for it; False: it is behind the run already, or
            not what the run is about.
        resume: the checkpoint that the run goes on from.

    Raises:
        ConfigError, DataError: data, a reward or a tracker cannot be used; nothing that was started is left.
    """
    measures: Sequence[Measure] = [] if config.eval.every_steps is None else config.eval.measures()
    with ExitStack() as made:  # what was started ends where the rest cannot be made
        rewards = start_run_rewards(config, registry, run_dir / "logs", measures) if rewarded else RunRewards()
        made.callback(rewards.close)
        tokenizer = load_run_tokenizer(config.model)
        asked = measures if rewarded else [HELD_OUT] * bool(measures)
        prompts = load_prompts(config, registry, tokenizer, view, measures=asked)
        if rewarded:
            check_rows(config, prompts.train, prompts.sets, measures)
        config = with_steps(config, len(prompts.train))
        # A run that is resumed behind its warm start still knows how many steps that had.
        supervised = supervised or (rewarded and config.sft.epochs is not None)
        learned = _learned(config, prompts.train, tokenizer, view) if supervised and config.sft.is_asked else None
        config = config if learned is None else with_sft_steps(config, len(learned[0]))
        rewards.wait_ready()
        materials = Materials(
            config=config,
            tokenizer=tokenizer,
            train_prompts=prompts.train,
            eval_prompts=prompts.sets,
            examples=load_examples(config, registry, tokenizer, prompts.train, view) if rewarded else (),
            learned=learned,
            rewards=rewards,
            sampling=sampling_params(config.rollout, config.model, tokenizer),
            output=RunOutput(
                run_dir=run_dir,
                view=view,
                trackers=build_trackers(config, registry, run_dir, None if resume is None else step_of(resume)),
                callbacks=build_callbacks(config.trainer.callbacks, registry),
            ),
        )
        made.pop_all()
    return materials


def open_stream(
    config: RunConfig,
    registry: Registry,
    group: CallsRanks,
    tokenizer: Any,
    rewards: RunRewards | None = None,
    notice: Callable[[str], None] = print,
) -> RolloutStream:
    """The stream over all replicas of a rollout group; `notice` receives what happened to `rewards`."""
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
            rollout=build_rollouter(rollout.rollouter, registry),
            rollout_options=rollout.rollouter_options,
            max_model_tokens=config.max_model_tokens,
            progress_s=config.deadlines.rollout_s,
        ),
        grader=None if rewards.train is None else reward_grader(config, rewards.train, notice),
        graders={f"eval/{name}": RewardGrader(runner, notice) for name, runner in rewards.sets.items()},
    )


def connect_judges(judges: Mapping[str, EngineJudge], session: Session, progress_s: float) -> None:
    """Lets the judges that are engines of the run ask their replicas."""
    for role, judge in judges.items():
        group = session.judges[role]
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
) -> Evaluation | None:
    """None where there are no evaluation prompts.

    Args:
        config: of the run.
        prompts: by name of the measure.
        sampling: of training; an evaluation has stop tokens and limits from it, and filters of its own.
        stream: that samples and grades.
        kind: what the rollout engine's log-probs are those of.
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
                reward_names=[reward.title for reward in measure.config.rewards or config.rewards],
                has_entropy=samples_whole_distribution(measure.config, kind),
            )
            for measure in config.eval.measures()
            if measure.name in prompts
        ],
        seed=config.trainer.seed,
        max_failure_share=config.reward_limits.max_failure_share,
    )


def eval_options(config: RunConfig) -> EvalOptions:
    """When a run is measured, and what follows from it."""
    return EvalOptions(
        every=config.eval.every_steps,
        at_start=config.eval.at_start,
        best=config.checkpoint.best,
        stopping=config.eval.early_stopping,
        save_samples=config.eval.save_samples,
    )


def rl_stage(config: RunConfig, registry: Registry, materials: Materials, session: Session) -> RlStage:
    """Reinforcement learning on a running session."""
    trainer, view = config.trainer, materials.output.view
    stream = open_stream(config, registry, session.rollout.group, materials.tokenizer, materials.rewards, view.notice)
    connect_judges(materials.rewards.judges, session, config.deadlines.rollout_s)
    state = TrainerState()
    exact = session.actor.role.model.dtype == "float32"

    def sync() -> SyncReport:
        report = session.weights().sync(state.policy_version, expect_change=exact and state.expects_change)
        state.expects_change = False
        return report

    def enter() -> AbstractContextManager[SyncReport]:
        return session.turns.rollout(sync)

    phase = RolloutPhase(enter, stream, view)
    decay = config.train.ema_decay
    if config.schedule.uncorrected:
        view.notice("warning: stale samples are trained without a correction (schedule.uncorrected)")
    publisher = _publisher(config, session, stream, state, phase, view, expects_change=exact)
    algorithm = algorithm_of(config, registry, materials)
    source = GroupSource(
        stream,
        prompts_of(config, materials),
        draw_of(algorithm, materials),
        groups_per_step=trainer.prompts_per_step,
        steps=trainer.steps,
        seed=trainer.seed,
        publisher=publisher,
        schedule=config.schedule,
        accept=lambda group: algorithm.accepts(scores_of(group)),
        max_groups_per_step=algorithm.max_groups,
        journal=None if config.schedule.journal == "none" else materials.output.run_dir / FOLDER,
        made_by=_made_by(config),
        text_of=text_of(materials),
    )
    return RlStage(
        source,
        PolicyLearner(session, algorithm, learner_options(config, session), state, view),
        phase,
        publisher,
        evaluation_of(
            config,
            materials.eval_prompts,
            materials.sampling,
            stream,
            session.rollout.spec.log_prob_kind,
        ),
        materials.output,
        RlOptions(
            temperature=config.rollout.temperature,
            reward_names=[reward.title for reward in config.rewards],
            max_failure_share=config.reward_limits.max_failure_share,
            shown_samples=config.tracking.samples_per_step,
            max_staleness=config.schedule.max_staleness,
        ),
        StageSettings(
            steps=trainer.steps,
            save_every=trainer.save_every_steps,
            saves_last=True,
            folder="checkpoints",
            exports=True,
        ),
        state,
        eval_options(config),
        None if decay is None else PolicyAverage(session, decay, timeout_s=config.deadlines.save_s),
    )


def algorithm_of(config: RunConfig, registry: Registry, materials: Materials) -> Algorithm:
    """The run's algorithm."""
    kind = registry.backend(BackendKind.ROLLOUT, config.rollout.backend).log_prob_kind
    comparable = comparable_log_probs(kind, config.rollout)
    return build_algorithm(config, registry, comparable=comparable, examples=materials.examples)


def prompts_of(config: RunConfig, materials: Materials) -> PromptStream:
    """The training prompts in the run's order, from the first one on."""
    return PromptStream(materials.train_prompts, seed=config.trainer.seed, shuffle=config.data.shuffle)


def draw_of(algorithm: Algorithm, materials: Materials) -> Draw:
    """How training groups are sampled."""
    return Draw(
        source="train",
        num_samples=algorithm.num_samples,
        sampling=materials.sampling,
        greedy_baseline=algorithm.greedy_baseline,
    )


def text_of(materials: Materials) -> Callable[[Trajectory], str]:
    """What rewards saw of a trajectory."""
    codec, stops = TokenCodec(materials.tokenizer), materials.sampling.stop_token_ids
    return lambda trajectory: codec.decode(without_stop(trajectory.response_ids, stops))


def _made_by(config: RunConfig) -> str:
    """A digest of what samples and grades depend on, as far as the configuration says it."""
    told = config.model_dump(
        mode="json", include={"model", "data", "rewards", "reward_models", "rollout", "schedule", "algorithm", "train"}
    )
    told["trainer"] = [config.trainer.seed, config.trainer.prompts_per_step, config.trainer.samples_per_prompt]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def _publisher(
    config: RunConfig,
    session: Session,
    stream: RolloutStream,
    state: TrainerState,
    phase: RolloutPhase,
    view: RunView,
    *,
    expects_change: bool,
) -> Publisher:
    """How weights get to the replicas: between steps, or while the next one trains."""
    if not config.schedule.overlaps:
        return TurnsPublisher(phase)
    return OverlappedPublisher(
        session,
        stream,
        state,
        on_new_weights=config.schedule.on_new_weights,
        expects_change=expects_change,
        timeout_s=config.deadlines.sync_s,
        synced=view.synced,
    )


def _learned(config: RunConfig, prompts: PromptDataset, tokenizer: Any, view: RunView) -> Learned:
    settings = AnswerSettings(
        template=config.sft.answer_template,
        max_tokens=config.rollout.max_response_tokens,
        long_answers=config.sft.long_answers,
        allow_special_tokens=config.data.allow_special_tokens,
    )
    return learned_answers(prompts, tokenizer, settings, view.notice)


def sft_stage(config: RunConfig, materials: Materials, session: Session, *, measured: bool = False) -> SftStage:
    """Supervised training on a running session, whose actor has the optimizer of it. `measured`: the loss on held-out
    answers is looked at, too, where there are any."""
    if materials.learned is None:
        raise ConfigError("sft.steps: 0 trains nothing; give --sft.steps N or --sft.epochs N")
    prompts, answers = materials.learned
    return SftStage(
        session,
        PromptStream(prompts, seed=request_seed(config.trainer.seed, "sft"), shuffle=config.data.shuffle),
        answers,
        RunOutput(run_dir=materials.output.run_dir, view=materials.output.view, trackers=materials.output.trackers),
        StageSettings(
            steps=config.sft.steps,
            save_every=config.sft.save_every_steps,
            saves_last=False,
            folder=CHECKPOINTS,
            exports=False,
        ),
        rows_per_step=config.sft.rows_per_step,
        update_timeout_s=config.deadlines.update_s,
        held_out=_held_out_answers(config, materials) if measured else None,
        when=eval_options(config),
    )


def _held_out_answers(config: RunConfig, materials: Materials) -> Learned | None:
    prompts = materials.eval_prompts.get(HELD_OUT.name)
    answered = [] if prompts is None else [at for at, prompt in enumerate(prompts) if prompt.answer is not None]
    if prompts is None or not answered:
        return None
    return _learned(config, prompts.subset(answered), materials.tokenizer, materials.output.view)


@dataclass(frozen=True, kw_only=True)
class RunPairs:
    """The pairs of a run."""

    config: RunConfig
    """With the number of steps that its epochs come to."""
    train: PairSet
    held_out: PairSet | None


def read_pairs(materials: Materials) -> RunPairs:
    """The pairs that are trained on, and those that are held out, as tokens.

    Raises:
        ConfigError, DataError: a row cannot be used, or a schedule does not fit the number of steps.
    """
    config = materials.config
    train = _pairs(config, materials, materials.train_prompts, "train")
    rows = materials.eval_prompts.get(HELD_OUT.name)
    held_out = None if rows is None else _pairs(config, materials, rows, "held-out")
    return RunPairs(config=with_pair_steps(config, len(train)), train=train, held_out=held_out)


def pair_stage(kind: PairTraining, materials: Materials, pairs: RunPairs, session: Session) -> PairStage:
    """Training from pairs on a running session, whose actor has the head and the optimizer of it."""
    config, train = pairs.config, pairs.train
    own, output = config.preferences, materials.output
    prompts = materials.train_prompts.subset(train.positions)
    objective = (
        RewardModelObjective(center_coef=own.center_coef)
        if kind is PairTraining.REWARD_MODEL
        else DpoObjective(loss=own.loss, beta=own.beta, label_smoothing=own.label_smoothing)
    )
    return PairStage(
        session,
        PromptStream(prompts, seed=request_seed(config.trainer.seed, "pairs"), shuffle=config.data.shuffle),
        train,
        pairs.held_out,
        output,
        StageSettings(
            steps=own.steps,
            save_every=own.save_every_steps,
            saves_last=False,
            folder=kind.checkpoints,
            exports=False,
        ),
        PairOptions(
            label=kind.label,
            objective=objective,
            pairs_per_step=own.pairs_per_step,
            update_timeout_s=config.deadlines.update_s,
        ),
        eval_options(config),
    )


def _pairs(config: RunConfig, materials: Materials, prompts: Sequence[Prompt], name: str) -> PairSet:
    own = config.preferences
    settings = PairSettings(
        chosen_field=own.chosen_field,
        rejected_field=own.rejected_field,
        margin_field=own.margin_field,
        answers=AnswerSettings(
            template=own.answer_template,
            max_tokens=config.rollout.max_response_tokens,
            long_answers=own.long_answers,
            allow_special_tokens=config.data.allow_special_tokens,
        ),
    )
    pairs = encode_pairs(prompts, materials.tokenizer, settings)
    materials.output.view.notice(f"{name} pairs: {pairs.report.line()}")
    return pairs


def learner_options(config: RunConfig, session: Session) -> LearnerOptions:
    """How a run's learner works."""
    weights = [model.weight for model in config.reward_models]
    return LearnerOptions(
        reward_weights=dict(zip(session.reward_models, weights, strict=True)),
        update_timeout_s=config.deadlines.update_s,
        parity_threshold=config.trainer.parity_threshold,
        parity_is_error=config.trainer.parity_action == "error",
    )
