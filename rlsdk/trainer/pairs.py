"""Tokenizes the pairs of answers that `rlsdk reward-model` and `rlsdk dpo` train on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlsdk.algorithms import pair_weights
from rlsdk.data import Answer, AnswerEncoder, DataRow, Prompt, Template, lookup, missing_field
from rlsdk.interfaces import Batch, DataError
from rlsdk.trainer.experience import make_sft_batch
from rlsdk.trainer.sft import AnswerSettings


@dataclass(frozen=True, kw_only=True)
class PairSettings:
    """The row fields of a pair, and how answers are tokenized."""

    chosen_field: str
    rejected_field: str
    margin_field: str | None
    answers: AnswerSettings


@dataclass(frozen=True, kw_only=True)
class PairReport:
    """Report on the pairs of a data set: how many are used, and which are left out."""

    num_rows: int
    equal: Sequence[str]
    """Sources of the pairs that were left out because both answers have the same tokens."""
    long: Sequence[str]
    """Sources of the pairs with an answer that is too long."""
    settings: AnswerSettings

    @property
    def num_kept(self) -> int:
        left_out = {*self.equal, *(self.long if self.settings.long_answers == "drop" else ())}
        return self.num_rows - len(left_out)

    def line(self) -> str:
        """The report as one line of text."""
        text = f"{self.num_kept:,} of {self.num_rows:,} pairs are used"
        if self.equal:
            text += f"; {len(self.equal):,} left out, whose answers are equal (first {self.equal[0]})"
        if self.long:
            what = "left out" if self.settings.long_answers == "drop" else "cut, without an end-of-sequence token,"
            limit = self.settings.max_tokens
            text += f"; {len(self.long):,} {what} with an answer of over {limit:,} tokens (first {self.long[0]})"
        return text


@dataclass(frozen=True, kw_only=True)
class PairSet:
    """Pairs, numbered from 0."""

    positions: Sequence[int]
    """Index of each pair's prompt in the given prompts."""
    prompts: Sequence[Sequence[int]]
    """Tokens of each prompt."""
    chosen: Sequence[Sequence[int]]
    """Tokens of each preferred answer."""
    rejected: Sequence[Sequence[int]]
    """Tokens of each rejected answer."""
    margins: Sequence[float] | None
    """Target margin of each pair; None: the data has none."""
    report: PairReport

    def __len__(self) -> int:
        return len(self.prompts)

    def batch(self, pairs: Sequence[int]) -> Batch:
        """Batch with two rows per pair, the preferred answer first; `uid` is the position in `pairs`, which may hold a
        pair twice. Has `response_mask`, `chosen`, `row_weight`, and `margin` if the data has margins."""
        count = len(pairs)
        prompts = [self.prompts[at] for at in pairs for _ in range(2)]
        batch = make_sft_batch(prompts, [rows[at] for at in pairs for rows in (self.chosen, self.rejected)])
        batch = batch.with_rows(
            uid=torch.arange(count).repeat_interleave(2), chosen=torch.tensor([True, False]).repeat(count)
        )
        if self.margins is not None:
            margins = torch.tensor([self.margins[at] for at in pairs], dtype=torch.float32)
            batch = batch.with_rows(margin=margins.repeat_interleave(2))
        return pair_weights(batch)


def encode_pairs(prompts: Sequence[Prompt], tokenizer: Any, settings: PairSettings) -> PairSet:
    """Tokenizes the pairs; leaves out those that cannot be trained on.

    Raises:
        DataError: a row lacks a field of its pair, a field holds something other than an answer or a margin, or no pair
            is left; names the row.
    """
    rows = [DataRow(row=prompt.row, source=prompt.source) for prompt in prompts]
    chosen = _answers(rows, settings.chosen_field, "preferences.chosen_field", tokenizer, settings.answers)
    rejected = _answers(rows, settings.rejected_field, "preferences.rejected_field", tokenizer, settings.answers)
    margins = None if settings.margin_field is None else [_margin(row, settings.margin_field) for row in rows]
    equal = [at for at in range(len(rows)) if chosen[at].token_ids == rejected[at].token_ids]
    long = [at for at in range(len(rows)) if chosen[at].cut or rejected[at].cut]
    left_out = {*equal, *(long if settings.answers.long_answers == "drop" else ())}
    kept = [at for at in range(len(rows)) if at not in left_out]
    report = PairReport(
        num_rows=len(rows),
        equal=[rows[at].source for at in equal],
        long=[rows[at].source for at in long],
        settings=settings.answers,
    )
    if not kept:
        raise DataError(
            f"no pair is left to learn from: {report.line()}; name other fields in preferences.chosen_field "
            f"{settings.chosen_field!r} and preferences.rejected_field {settings.rejected_field!r}, raise "
            f"rollout.max_response_tokens {settings.answers.max_tokens}, or set preferences.long_answers to 'cut'"
        )
    return PairSet(
        positions=kept,
        prompts=[prompts[at].prompt_ids for at in kept],
        chosen=[chosen[at].token_ids for at in kept],
        rejected=[rejected[at].token_ids for at in kept],
        margins=None if margins is None else [margins[at] for at in kept],
        report=report,
    )


def _answers(
    rows: Sequence[DataRow], field: str, asked_by: str, tokenizer: Any, settings: AnswerSettings
) -> list[Answer]:
    template = Template(settings.template)
    texts = [template.fill(row, answer=_text(row, field, asked_by)) for row in rows]
    encoder = AnswerEncoder(tokenizer, settings.max_tokens, allow_special_tokens=settings.allow_special_tokens)
    return encoder.encode(texts, [row.source for row in rows])


def _text(row: DataRow, field: str, asked_by: str) -> str:
    value = _value(row, field, asked_by)
    if isinstance(value, str):
        return value
    last = value[-1] if isinstance(value, list) and value else None
    content = last.get("content") if isinstance(last, dict) and last.get("role") == "assistant" else None
    if isinstance(content, str):
        return content
    raise DataError(
        f"{row.source}: field {field!r} ({asked_by}) must be a text, or a list of messages that ends in "
        f'{{"role": "assistant", "content": text}}, got {str(value)[:80]!r}'
    )


def _margin(row: DataRow, field: str) -> float:
    value = _value(row, field, "preferences.margin_field")
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0:
        return float(value)
    raise DataError(
        f"{row.source}: field {field!r} (preferences.margin_field) must be a number of at least 0, got "
        f"{str(value)[:80]!r}"
    )


def _value(row: DataRow, field: str, asked_by: str) -> Any:
    try:
        return lookup(row.row, field)
    except KeyError:
        raise missing_field(field, row, asked_by) from None
