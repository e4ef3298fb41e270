"""Reference answers: tokenized, and those that are too long left out or cut."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from rlsdk.data import (
    Answer,
    AnswerEncoder,
    AnswerEnds,
    AnswerReport,
    DataRow,
    LearnedRow,
    PromptDataset,
    PromptFormat,
    Reply,
    TurnTokens,
    answer_report,
    earlier_turns,
    encode_prompts,
    learned_reply,
    learned_rows,
)
from rlsdk.interfaces import DataError
from rlsdk.system.quantities import counted

Learned = tuple[PromptDataset, Sequence[Sequence[int]]]
"""Prompts, and the answer tokens that are trained on after each."""
Conversations = tuple[PromptDataset, Sequence[Sequence[LearnedRow]]]
"""Prompts, and for each the rows that are trained on: one, unless the chat template changes earlier turns."""
NOTHING: Mapping[int, LearnedRow] = MappingProxyType({})


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
    answers, report = _encoded(prompts.rows, tokenizer, settings, notice)
    kept = [at for at, answer in enumerate(answers) if _is_learned(answer, settings)]
    if not kept:
        raise _all_too_long(report, settings)
    return prompts.subset(kept), [answers[at].token_ids for at in kept]


def learned_conversations(
    prompts: PromptDataset,
    tokenizer: Any,
    settings: AnswerSettings,
    notice: Callable[[str], None],
    *,
    every: bool,
    given: Mapping[int, LearnedRow] = NOTHING,
) -> Conversations:
    """Returns the prompts to train on with the rows of each; `long_answers` decides which turns are not learned.

    Args:
        prompts: conversations up to the last answer.
        tokenizer: of the policy.
        settings: how answers are tokenized.
        notice: shows a line.
        every: learn every turn of the assistant, rather than the answer alone.
        given: rows whose tokens are known, by index of the prompt; they are learned as they are.

    Raises:
        DataError: a row has no answer, or all answers are too long.
    """
    others = [at for at in range(len(prompts)) if at not in given]
    encoded = _conversations(prompts.subset(others), tokenizer, settings, notice, every=every) if others else []
    rest = iter(encoded)
    made = [[given[at]] if at in given else next(rest) for at in range(len(prompts))]
    kept = [at for at, rows in enumerate(made) if rows]
    return prompts.subset(kept), [made[at] for at in kept]


def _conversations(
    prompts: PromptDataset, tokenizer: Any, settings: AnswerSettings, notice: Callable[[str], None], *, every: bool
) -> list[list[LearnedRow]]:
    """The rows of each conversation, as they are tokenized here; none where nothing of it is learned.

    Raises:
        DataError: a row has no answer, or all answers are too long.
    """
    before = [[*earlier_turns(row)] if every else [] for row in prompts.rows]
    earlier = [row for rows in before for row in rows]
    answers, report = _encoded(prompts.rows, tokenizer, settings, notice, earlier)
    ids = [tuple(one.tolist()) for one in encode_prompts(earlier, tokenizer, settings.form)]
    turns = [
        TurnTokens(prompt_ids=asked, answer_ids=answer.token_ids, is_learned=_is_learned(answer, settings))
        for asked, answer in zip([*ids, *(one.prompt_ids for one in prompts)], answers, strict=True)
    ]
    first, made = iter(turns[: len(earlier)]), []
    for rows, last in zip(before, turns[len(earlier) :], strict=True):
        made.append(learned_rows([*itertools.islice(first, len(rows)), last]))
    if not any(made):
        raise _all_too_long(report, settings)
    if earlier:
        text = f"{len(earlier):,} earlier turns of the assistant are learned, too ({settings.section}.turns)"
        apart = sum(len(rows) > 1 for rows in made)
        more = f"; {counted(apart, 'conversation')} in several rows each, as the chat template changes earlier turns"
        notice(f"{settings.section}: {text}{more if apart else ''}")
    return made


def _encoded(
    rows: Sequence[DataRow],
    tokenizer: Any,
    settings: AnswerSettings,
    notice: Callable[[str], None],
    earlier: Sequence[DataRow] = (),
) -> tuple[list[Answer], AnswerReport]:
    """The answers of `earlier` rows as they are, then those of `rows` in their template; and what is said of them.

    Raises:
        DataError: a row has no answer, or one that cannot be encoded.
    """
    limit = settings.max_tokens
    encoder = AnswerEncoder(tokenizer, limit, settings.ends, form=settings.form)
    answers = [
        answer
        for part, template in ((earlier, "{answer}"), (rows, settings.template))
        for answer in encoder.encode_replies(part, [_reply(row, settings) for row in part], template)
    ]
    special_allowed = settings.form.allow_special_tokens
    sources = [row.source for row in (*earlier, *rows)]
    report = answer_report(answers, sources, limit, settings.long_answers, special_allowed=special_allowed)
    if report.num_long or report.notes:
        notice(f"{settings.section}: {report.line()}")
    return answers, report


def _is_learned(answer: Answer, settings: AnswerSettings) -> bool:
    return settings.long_answers == "cut" or not answer.cut


def _all_too_long(report: AnswerReport, settings: AnswerSettings) -> DataError:
    section, choice = settings.section, settings.long_answers
    return DataError(
        f"{section}: {report.line()}; raise rollout.max_response_tokens {settings.max_tokens}"
        + (f", or choose {section}.long_answers 'cut', which is {choice!r}" if settings.can_cut else "")
    )


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
