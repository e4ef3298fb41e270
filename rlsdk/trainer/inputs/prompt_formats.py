"""How a run's configuration makes prompts of rows. Imports no torch: rows are checked before that import."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlsdk.config import EvalSetConfig, RunConfig
from rlsdk.data import DataRow, PairFields, PromptFormat, StepFields, question_key, split_by_content
from rlsdk.interfaces import DataError


def prompt_format(config: RunConfig, *, of_pairs: bool = False, of_steps: bool = False) -> PromptFormat:
    """The format that makes training prompts from rows. `of_pairs`: rows are preference pairs, whose conversations may
    hold the prompt; `of_steps`: rows are solutions in steps."""
    data, own = config.data, config.preferences
    return PromptFormat(
        prompt_field=data.prompt_field,
        answer_field=data.answer_field,
        prompt_template=data.prompt_template,
        system_prompt=data.system_prompt,
        chat_template=data.chat_template,
        chat_template_kwargs=dict(data.chat_template_kwargs),
        allow_special_tokens=data.allow_special_tokens,
        pair=PairFields(chosen=own.chosen_field, rejected=own.rejected_field) if of_pairs else None,
        steps=StepFields(steps=own.step_field, labels=own.step_label_field) if of_steps else None,
    )


def hold_out(config: RunConfig, rows: Sequence[DataRow], form: PromptFormat) -> tuple[list[DataRow], str]:
    """The rows that are held out for evaluation, and a line about their number if it is not `data.num_eval_rows`.

    The default number is lowered to an eighth of the questions where it would leave none to train on.

    Args:
        config: of the run.
        rows: of all its training sources.
        form: of the prompts.

    Raises:
        DataError: too few questions.
    """
    asked, seed = config.data.num_eval_rows, config.trainer.seed
    try:
        return split_by_content(rows, form=form, num_eval=asked, seed=seed)[1], ""
    except DataError:
        count = len({question_key(row) for row in form.select(rows)})
        if asked != type(config.data).model_fields["num_eval_rows"].default or count < 2:
            raise
    fewer = max(count // 8, 1)
    held = split_by_content(rows, form=form, num_eval=fewer, seed=seed)[1]
    return held, f"data.num_eval_rows {fewer}: there are {count} questions"


def set_format(form: PromptFormat, part: EvalSetConfig) -> PromptFormat:
    """The format that makes an evaluation set's prompts from rows: the training format with the set's own settings."""
    own: dict[str, Any] = {
        "prompt_field": part.prompt_field,
        "answer_field": part.answer_field,
        "prompt_template": part.prompt_template,
        "chat_template_kwargs": part.chat_template_kwargs,
        "system_prompt": part.system_prompt,
    }
    form = replace(form, **{name: value for name, value in own.items() if value is not None})
    return replace(form, system_prompt=None) if part.system_prompt == "" else form
