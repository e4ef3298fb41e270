"""Inputs of a run that are built before a worker exists: data, tokenizer, rewards, trackers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsdk.config import Measure, Role, RunConfig
from rlsdk.config.sections.evaluation import HELD_OUT
from rlsdk.config.sections.role_kinds import teacher_role
from rlsdk.data import AnswerEnds, LearnedRow, PromptDataset
from rlsdk.interfaces import (
    Example,
    SamplingParams,
    StepCallback,
    Tracker,
    TrackerContext,
)
from rlsdk.registry import ComponentKind, Registry
from rlsdk.trainer.checkpoints.checkpoint import step_of
from rlsdk.trainer.inputs.answers import NOTHING, AnswerSettings, Conversations, learned_conversations
from rlsdk.trainer.inputs.data import load_examples, load_prompts, with_sft_steps, with_steps
from rlsdk.trainer.inputs.prompt_formats import prompt_format
from rlsdk.trainer.inputs.rewards import check_rows
from rlsdk.trainer.inputs.run_rewards import RunRewards, start_run_rewards
from rlsdk.trainer.inputs.teachers import check_teachers, given_rows
from rlsdk.trainer.inputs.tokenizer import load_run_tokenizer, run_ends, sampling_params
from rlsdk.trainer.inputs.vocabulary import Vocabulary, odd_ends, read_vocabulary
from rlsdk.trainer.tracking.run_output import RunOutput

if TYPE_CHECKING:
    from rlsdk.trainer.tracking.events import RunView


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """Everything that can be built, and can fail, before a worker exists. It uses no device."""

    config: RunConfig
    """The configuration, with epochs converted to a number of steps."""
    tokenizer: Any
    train_prompts: PromptDataset
    eval_prompts: Mapping[str, PromptDataset]
    """Evaluation prompts by name of the measure; empty without evaluations."""
    examples: Sequence[Example]
    """Examples of the supervised loss term; empty without one."""
    learned: Conversations | None
    """Prompts of supervised training and the answer tokens of each; None without supervised training."""
    rewards: RunRewards
    sampling: SamplingParams
    """Sampling parameters of training."""
    ends: AnswerEnds
    """The tokens that end an answer, in what is learned and in what is sampled."""
    vocabulary: Vocabulary
    output: RunOutput

    def close(self) -> None:
        self.rewards.close()
        self.output.close()


def build_run_inputs(
    config: RunConfig,
    registry: Registry,
    run_dir: Path,
    view: RunView,
    *,
    rewarded: bool = True,
    supervised: bool = True,
    taught: bool = False,
    of_pairs: bool = False,
    of_steps: bool = False,
    table: Sequence[Role] = (),
    resume: Path | None = None,
) -> RunInputs:
    """Starts the grading processes first: their imports continue while data is read. Supervised training needs none.

    Args:
        config: the run's configuration.
        registry: the installed backends and components.
        run_dir: the run's folder.
        view: receives notices about rows that were left out of the data.
        rewarded: start the grading processes.
        supervised: prepare supervised training if `sft` configures it; False: the run has completed it, or it is not
            part of the run.
        taught: teachers teach the answers of the rows.
        of_pairs: rows are preference pairs.
        of_steps: rows are solutions in steps.
        table: roles of the run, whose models must know every token.
        resume: checkpoint from which the run continues.

    Raises:
        ConfigError, DataError: data, a reward or a tracker cannot be used; everything started before is closed.
    """
    measures: Sequence[Measure] = [] if config.eval.every_steps is None else config.eval.measures()
    with ExitStack() as made:  # closes what was started if the rest fails
        rewards = start_run_rewards(config, registry, run_dir / "logs", measures) if rewarded else RunRewards()
        made.callback(rewards.close)
        tokenizer = load_run_tokenizer(config.model)
        ends = run_ends(config, tokenizer)
        if not rewarded or (supervised and config.sft.is_asked) or config.algorithm.ptx.coef:
            _say_end(ends, tokenizer, view)
        apart = {teacher_role(one.name) for one in config.teachers if one.align == "text"}
        readers = [role for role in table if role.name not in apart]
        vocabulary = read_vocabulary(config.model, readers, tokenizer, ends)
        for text in odd_ends(config, tokenizer):
            view.notice(text)
        asked = measures if rewarded else [HELD_OUT] * bool(measures)
        prompts = load_prompts(config, registry, tokenizer, view, measures=asked, of_pairs=of_pairs, of_steps=of_steps)
        for part in (prompts.train, *prompts.sets.values()):
            vocabulary.check_prompts(part)
        if rewarded:
            for text in check_rows(config, registry, prompts.train, prompts.sets, measures):
                view.notice(text)
        if rewarded or taught:
            for text in check_teachers(config, prompts.train, tokenizer, on_answers=taught):
                view.notice(text)
        config = with_steps(config, len(prompts.train))
        # A run that is resumed after its warm start still needs its number of steps.
        supervised = supervised or (rewarded and config.sft.epochs is not None)
        asks_sft = supervised and config.sft.is_asked
        given = given_rows(config, prompts.train, tokenizer) if taught else NOTHING
        learned = learned_of(config, prompts.train, tokenizer, ends, view, given) if asks_sft else None
        config = config if learned is None else with_sft_steps(config, len(learned[0]))
        examples = load_examples(config, registry, tokenizer, prompts.train, view, ends) if rewarded else []
        if learned is not None:
            learned_ids = [(one.token_ids, row.source) for row, rows in zip(learned[0].rows, learned[1], strict=True)
                           for one in rows]  # fmt: skip
            vocabulary.check_rows([ids for ids, _ in learned_ids], [source for _, source in learned_ids])
        vocabulary.check_rows(
            [[*one.prompt_ids, *one.answer_ids] for one in examples], ["algorithm.ptx"] * len(examples)
        )
        if (said := vocabulary.notice()) is not None:
            view.notice(said)
        rewards.wait_ready()
        run_inputs = RunInputs(
            config=config,
            tokenizer=tokenizer,
            train_prompts=prompts.train,
            eval_prompts=prompts.sets,
            examples=examples,
            learned=learned,
            rewards=rewards,
            sampling=sampling_params(config.rollout, ends),
            ends=ends,
            vocabulary=vocabulary,
            output=RunOutput(
                run_dir=run_dir,
                view=view,
                trackers=build_trackers(config, registry, run_dir, None if resume is None else step_of(resume)),
                callbacks=build_callbacks(config.trainer.callbacks, registry),
            ),
        )
        made.pop_all()
    return run_inputs


def _say_end(ends: AnswerEnds, tokenizer: Any, view: RunView) -> None:
    """Reports the token that ends learned answers, if it is not the end-of-sequence token."""
    if ends.learned != tokenizer.eos_token_id:
        name = tokenizer.convert_ids_to_tokens(ends.learned)
        view.notice(
            f"learned answers end with {name!r}, which ends a turn in the chat template or is one of "
            f"rollout.stop_token_ids, and not with the tokenizer's end-of-sequence token {tokenizer.eos_token!r}"
        )


def learned_of(
    config: RunConfig,
    prompts: PromptDataset,
    tokenizer: Any,
    ends: AnswerEnds,
    view: RunView,
    given: Mapping[int, LearnedRow] = NOTHING,
) -> Conversations:
    """The prompts and rows of supervised training; `given`: see `learned_conversations`."""
    settings = AnswerSettings(
        template=config.sft.answer_template,
        max_tokens=config.rollout.max_response_tokens,
        long_answers=config.sft.long_answers,
        form=prompt_format(config),
        ends=ends,
    )
    return learned_conversations(
        prompts, tokenizer, settings, view.notice, every=config.sft.turns == "all", given=given
    )


def build_trackers(
    config: RunConfig, registry: Registry, run_dir: Path, resume_step: int | None = None
) -> list[Tracker]:
    return [
        registry.component(ComponentKind.TRACKER, name)(
            TrackerContext(
                run_dir=str(run_dir),
                run_name=run_dir.name,
                config=config.model_dump(mode="json"),
                options=config.tracking.options.get(name, {}),
                resume_step=resume_step,
            )
        )
        for name in config.tracking.trackers
    ]


def build_callbacks(names: Sequence[str], registry: Registry) -> list[StepCallback]:
    return [registry.function(ComponentKind.CALLBACK, name) for name in names]
