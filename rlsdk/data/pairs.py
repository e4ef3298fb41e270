"""Preference pairs: the prompt, and the two answers to it."""

from __future__ import annotations

from dataclasses import dataclass

from rlsdk.data.messages import (
    ASSISTANT,
    check_messages,
    common_length,
    content_text,
    holds_messages,
    same_messages,
)
from rlsdk.data.rows import DataRow, Messages, Pair, lookup, missing_field
from rlsdk.interfaces import DataError


@dataclass(frozen=True, kw_only=True)
class PairFields:
    """Fields of a row that hold the two answers: texts, messages of the assistant, or whole conversations that are
    equal up to their last turn."""

    chosen: str
    rejected: str


def read_pair(row: DataRow, fields: PairFields) -> Pair:
    """The pair of a row.

    Raises:
        DataError: a field is missing or holds something else, or the conversations differ before their last turn.
    """
    chosen = _answer_of(row, fields.chosen, "preferences.chosen_field")
    rejected = _answer_of(row, fields.rejected, "preferences.rejected_field")
    whole = [side for side in (chosen, rejected) if not isinstance(side, str)]
    if len(whole) == 2 and not same_messages(whole[0][:-1], whole[1][:-1]):
        common = common_length(*whole)
        raise DataError(
            f"{row.source}: fields {fields.chosen!r} and {fields.rejected!r} differ from message {common + 1} on, with "
            f"{len(whole[0])} and {len(whole[1])} messages: expected conversations that are equal up to their last "
            "turn, the answer. Shorten both to the turn in which they differ, or leave the row out"
        )
    return Pair(
        chosen=chosen if isinstance(chosen, str) else chosen[-1],
        rejected=rejected if isinstance(rejected, str) else rejected[-1],
        context=whole[0][:-1] if whole else (),
    )


def with_context(row: DataRow, prompt: str | Messages | None, asked: str, context: Messages) -> str | Messages:
    """The prompt of a pair whose conversations hold messages before the answers.

    Args:
        row: of the pair.
        prompt: the row's own prompt; None: it has none.
        asked: text of its prompt field, which the prompt may be a template of.
        context: messages before the answers; not empty.

    Raises:
        DataError: prompt and conversations do not fit together.
    """
    if prompt is None:
        return context
    if isinstance(prompt, str):
        texts = {prompt.strip(), asked.strip()}
        users = [content_text(turn).strip() for turn in context if turn["role"] == "user"]
        if len(context) == 1 and texts & set(users):
            return prompt
        if texts & set(users):
            return context
        given: Messages = [{"role": "user", "content": prompt}]
    else:
        given = prompt
        if same_messages(context[: len(given)], given) or same_messages(context[-len(given) :], given):
            return context
    if context[0]["role"] == ASSISTANT:  # the conversations go on from the prompt
        return [*given, *context]
    raise DataError(
        f"{row.source}: the conversations of the pair do not hold the prompt {str(prompt)[:60]!r}: they begin with "
        f"{str(dict(context[0]))[:80]!r}. Leave the prompt out of the row, or the turns before the answers"
    )


def _answer_of(row: DataRow, field: str, asked_by: str) -> str | Messages:
    """One side of a pair: a text, or messages of which the last one is the answer."""
    try:
        value = lookup(row.row, field)
    except KeyError:
        raise missing_field(field, row, asked_by, flag=asked_by) from None
    if isinstance(value, str):
        return value
    if holds_messages(value):
        turns = check_messages(value, row.source, f"field {field!r} ({asked_by})")
        if turns[-1]["role"] == ASSISTANT:
            return turns
    raise DataError(
        f"{row.source}: field {field!r} ({asked_by}) must be a text, or a list of messages that ends in "
        f'{{"role": "assistant", "content": text}}, got {str(value)[:80]!r}'
    )
