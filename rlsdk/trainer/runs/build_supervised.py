"""Builds the stages that train on given answers from the configuration: supervised training, and preferences."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlsdk.algorithms import DpoObjective, KtoObjective, ProcessRewardObjective, RewardModelObjective
from rlsdk.config import PairTraining, PreferencesConfig, RunConfig
from rlsdk.config.derived.step_passes import pass_of_teacher
from rlsdk.config.sections.evaluation import HELD_OUT
from rlsdk.config.sections.role_kinds import teacher_role
from rlsdk.data import PromptDataset, PromptStream
from rlsdk.interfaces import ConfigError
from rlsdk.interfaces.spelling import Setting
from rlsdk.rollouts import request_seed
from rlsdk.trainer.checkpoints.run_folder import DISTILL as DISTILL_CHECKPOINTS
from rlsdk.trainer.inputs.answers import AnswerSettings, Conversations
from rlsdk.trainer.inputs.data import with_pair_steps
from rlsdk.trainer.inputs.prompt_formats import prompt_format
from rlsdk.trainer.inputs.step_ends import StepReader
from rlsdk.trainer.inputs.teachers import Taught
from rlsdk.trainer.runs.run_inputs import RunInputs, learned_of
from rlsdk.trainer.stages.distill import DistillStage
from rlsdk.trainer.stages.evaluation.settings import eval_options
from rlsdk.trainer.stages.labels import LabelledSet, encode_labelled
from rlsdk.trainer.stages.pairs import PairSet, PairSettings, encode_pairs
from rlsdk.trainer.stages.preferences import PairObjective, PairOptions, PairStage
from rlsdk.trainer.stages.sft import CHECKPOINTS, SftStage
from rlsdk.trainer.stages.stage import StageSettings
from rlsdk.trainer.stages.steps import StepSet, encode_steps
from rlsdk.trainer.tracking.run_output import RunOutput

if TYPE_CHECKING:
    from rlsdk.trainer.roles.session import Session


def sft_stage(config: RunConfig, run_inputs: RunInputs, session: Session, *, measured: bool = False) -> SftStage:
    """Builds the stage of supervised training on a running session whose actor has the optimizer for it. `measured`:
    also evaluate the loss on held-out answers, if there are any."""
    return SftStage(**_supervised(config, run_inputs, session, measured=measured))


def distill_stage(
    config: RunConfig, run_inputs: RunInputs, session: Session, *, measured: bool = False
) -> DistillStage:
    """Builds the stage of distillation on given answers, on a running session with the teachers."""
    made = _supervised(config, run_inputs, session, measured=measured)
    return DistillStage(
        **{**made, "settings": replace(made["settings"], folder=DISTILL_CHECKPOINTS)},
        taught=Taught.of_run(
            config, run_inputs.learned[0] if run_inputs.learned else run_inputs.train_prompts, run_inputs.tokenizer
        ),
        passes=[pass_of_teacher(config, teacher_role(one.name)) for one in config.teachers],
        distillation=config.algorithm.distillation,
    )


def _supervised(config: RunConfig, run_inputs: RunInputs, session: Session, *, measured: bool) -> dict[str, Any]:
    """Arguments of the stage of supervised training."""
    if run_inputs.learned is None:
        raise ConfigError(
            f"sft.steps: 0 trains nothing; give {Setting('sft.steps', 'N')} or {Setting('sft.epochs', 'N')}"
        )
    prompts, rows = run_inputs.learned
    output = run_inputs.output
    return {
        "session": session,
        "stream": PromptStream(prompts, seed=request_seed(config.trainer.seed, "sft"), shuffle=config.data.shuffle),
        "rows": rows,
        "output": RunOutput(run_dir=output.run_dir, view=output.view, trackers=output.trackers),
        "settings": StageSettings(
            steps=config.sft.steps,
            save_every=config.sft.save_every_steps,
            saves_last=False,
            folder=CHECKPOINTS,
            exports=False,
        ),
        "rows_per_step": config.sft.rows_per_step,
        "update_timeout_s": config.deadlines.update_s,
        "held_out": _held_out_answers(config, run_inputs) if measured else None,
        "when": eval_options(config),
    }


def _held_out_answers(config: RunConfig, run_inputs: RunInputs) -> Conversations | None:
    prompts = run_inputs.eval_prompts.get(HELD_OUT.name)
    answered = [] if prompts is None else [at for at, prompt in enumerate(prompts) if prompt.answer is not None]
    if prompts is None or not answered:
        return None
    return learned_of(config, prompts.subset(answered), run_inputs.tokenizer, run_inputs.ends, run_inputs.output.view)


@dataclass(frozen=True, kw_only=True)
class RunPairs:
    """The pairs, labelled answers or solutions in steps of a run."""

    config: RunConfig
    """The run's configuration, with epochs converted to a number of steps."""
    train: PairSet | LabelledSet | StepSet
    held_out: PairSet | LabelledSet | StepSet | None


def read_pairs(kind: PairTraining, run_inputs: RunInputs) -> RunPairs:
    """Tokenizes the pairs, labelled answers or solutions to train on, and those that are held out.

    Raises:
        ConfigError, DataError: a row cannot be used, or a schedule does not fit the number of steps.
    """
    config = run_inputs.config
    read = _pairs if kind.reads_pairs else _labelled if kind is PairTraining.KTO else _solutions
    train = read(config, run_inputs, run_inputs.train_prompts, "train")
    rows = run_inputs.eval_prompts.get(HELD_OUT.name)
    held_out = None if rows is None else read(config, run_inputs, rows, "held-out")
    return RunPairs(config=with_pair_steps(config, len(train)), train=train, held_out=held_out)


def pair_stage(kind: PairTraining, run_inputs: RunInputs, pairs: RunPairs, session: Session) -> PairStage:
    """Builds the stage of training from preferences on a running session whose actor has its head and optimizer."""
    config, train = pairs.config, pairs.train
    own, output = config.preferences, run_inputs.output
    prompts = run_inputs.train_prompts.subset(train.positions)
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
            objective=_objective(kind, own),
            pairs_per_step=own.pairs_per_step,
            update_timeout_s=config.deadlines.update_s,
        ),
        eval_options(config),
    )


def _objective(kind: PairTraining, own: PreferencesConfig) -> PairObjective:
    if kind is PairTraining.REWARD_MODEL:
        return RewardModelObjective(center_coef=own.center_coef)
    if kind is PairTraining.PROCESS_REWARD:
        return ProcessRewardObjective()
    if kind is PairTraining.KTO:
        return KtoObjective(
            beta=own.beta, desirable_weight=own.desirable_weight, undesirable_weight=own.undesirable_weight
        )
    return DpoObjective(
        loss=own.loss,
        beta=own.beta,
        label_smoothing=own.label_smoothing,
        sft_coef=own.nll_coef,
        target_margin=own.target_margin if own.loss == "simpo" else 0.0,
    )


def _pairs(config: RunConfig, run_inputs: RunInputs, prompts: PromptDataset, name: str) -> PairSet:
    settings = PairSettings(
        margin_field=config.preferences.margin_field, answers=_answers(config, run_inputs, of_pairs=True)
    )
    pairs = encode_pairs(prompts, run_inputs.tokenizer, settings)
    sources = [prompts.rows[at].source for at in pairs.positions]
    for answers in (pairs.chosen, pairs.rejected):
        run_inputs.vocabulary.check_rows(answers, sources)
    run_inputs.output.view.notice(f"{name} pairs: {pairs.report.line()}")
    return pairs


def _labelled(config: RunConfig, run_inputs: RunInputs, prompts: PromptDataset, name: str) -> LabelledSet:
    own, notice = config.preferences, run_inputs.output.view.notice
    settings = _answers(config, run_inputs, of_pairs=False)
    found = encode_labelled(prompts, run_inputs.tokenizer, settings, own.label_field, notice)
    run_inputs.vocabulary.check_rows(found.answers, [prompts.rows[at].source for at in found.positions])
    notice(f"{name} data: {found.line(own.desirable_weight, own.undesirable_weight)}")
    return found


def _solutions(config: RunConfig, run_inputs: RunInputs, prompts: PromptDataset, name: str) -> StepSet:
    tokenizer, separator = run_inputs.tokenizer, config.preferences.step_separator
    settings = AnswerSettings(template="{answer}", **_limits(config, run_inputs), form=prompt_format(config))
    reader = StepReader(tokenizer=tokenizer, separator=separator, stops=run_inputs.ends.stops)
    found = encode_steps(prompts, tokenizer, settings, separator, reader)
    run_inputs.vocabulary.check_rows(found.answers, [prompts.rows[at].source for at in found.positions])
    run_inputs.output.view.notice(f"{name} data: {found.report}")
    return found


def _answers(config: RunConfig, run_inputs: RunInputs, *, of_pairs: bool) -> AnswerSettings:
    return AnswerSettings(
        template=config.preferences.answer_template,
        form=prompt_format(config, of_pairs=of_pairs),
        **_limits(config, run_inputs),
    )


def _limits(config: RunConfig, run_inputs: RunInputs) -> Any:
    return {
        "max_tokens": config.rollout.max_response_tokens,
        "long_answers": config.preferences.long_answers,
        "ends": run_inputs.ends,
        "section": "preferences",
    }
