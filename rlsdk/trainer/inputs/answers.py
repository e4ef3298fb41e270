"""Reference answers: tokenized, and those that are too long left out or cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlsdk.data import (
    AnswerEncoder,
    AnswerEnds,
    DataRow,
    PromptDataset,
    PromptFormat,
    Reply,
    answer_report,
    learned_reply,
)
from rlsdk.interfaces import DataError

Learned = tuple[PromptDataset, Sequence[Sequence[int]]]
"""Prompts, and the answer tokens that are trained on after each."""


@dataclass(frozen=True, kw_only=True)
class AnswerSettings:
    """How answers are tokenized."""

    template: str
    max_tokens: int
    """Largest number of tokens of an answer, including the token that ends it."""
    long_answers: Literal["drop", "cut"]
    form: PromptFormat
    """Format of the prompts that are answered."""
    ends: AnswerEnds
    section: str = "sft"
    """Configuration section, for messages."""
    can_cut: bool = True
    """Whether the section has a field `long_answers`."""


def learned_answers(
    prompts: PromptDataset, tokenizer: Any, settings: AnswerSettings, notice: Callable[[str], None]
) -> Learned:
    """Returns the prompts to train on with their answer tokens; `long_answers` decides which are left out.

    Raises:
        DataError: a row has no answer, or all answers are too long.
    """
    limit, choice = settings.max_tokens, settings.long_answers
    replies = [_reply(row, settings) for row in prompts.rows]
    sources = [row.source for row in prompts.rows]
    encoder = AnswerEncoder(tokenizer, limit, settings.ends, form=settings.form)
    answers = encoder.encode_replies(prompts.rows, replies, settings.template)
    report = answer_report(answers, sources, limit, choice, special_allowed=settings.form.allow_special_tokens)
    if report.num_long or report.notes:
        notice(f"{settings.section}: {report.line()}")
    kept = [at for at, answer in enumerate(answers) if choice == "cut" or not answer.cut]
    if not kept:
        raise DataError(
            f"{settings.section}: {report.line()}; raise rollout.max_response_tokens {limit}"
            + (f", or choose {settings.section}.long_answers 'cut', which is {choice!r}" if settings.can_cut else "")
        )
    return prompts.subset(kept), [answers[at].token_ids for at in kept]


def _reply(row: DataRow, settings: AnswerSettings) -> Reply:
    """What is learned after a prompt."""
    reply = learned_reply(row, settings.form.answer_name(row))
    if reply is None:
        without = {"sft": "sft.steps 0", "algorithm.ptx": "algorithm.ptx.coef 0"}.get(settings.section)
        raise DataError(
            f"{row.source}: has no answer to learn from; name its field in data.answer_field"
            + (f", or do without supervised training ({without})" if without else "")
        )
    return reply
