"""Conversations as rows for supervised training: every turn of the assistant is learned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rlsdk.data.messages import ASSISTANT
from rlsdk.data.rows import DataRow


@dataclass(frozen=True, kw_only=True)
class LearnedRow:
    """Tokens of which some are learned."""

    token_ids: tuple[int, ...]
    learned: tuple[tuple[int, int], ...]
    """Where learned tokens begin and end, in order, without overlaps."""


@dataclass(frozen=True, kw_only=True)
class TurnTokens:
    """One turn of the assistant, and what stands before it."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    is_learned: bool = True


def earlier_turns(row: DataRow) -> Iterator[DataRow]:
    """Each turn of the assistant in a selected row's prompt as the answer to what stands before it."""
    if isinstance(row.prompt, str):
        return
    for at, turn in enumerate(row.prompt):
        if at and turn["role"] == ASSISTANT:
            yield replace(row, prompt=row.prompt[:at], reply=row.prompt[at : at + 1])


def learned_rows(turns: Sequence[TurnTokens]) -> list[LearnedRow]:
    """The rows of a conversation: a turn goes on in the row of the one before it where the template keeps that row as
    it is, and begins a row otherwise (a template that drops the reasoning of earlier turns). Rows without a learned
    token are left out.

    Args:
        turns: in order.
    """
    rows: list[tuple[tuple[int, ...], list[tuple[int, int]]]] = []
    for turn in turns:
        ids = turn.prompt_ids + turn.answer_ids
        span = [(len(turn.prompt_ids), len(ids))] if turn.is_learned and turn.answer_ids else []
        if rows and turn.prompt_ids[: len(rows[-1][0])] == rows[-1][0]:
            rows[-1] = ids, rows[-1][1] + span
        else:
            rows.append((ids, span))
    return [LearnedRow(token_ids=ids, learned=tuple(spans)) for ids, spans in rows if spans]
