"""Tokenizes the pairs of answers that `rlsdk reward-model` and `rlsdk dpo` train on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlsdk.algorithms import pair_weights
from rlsdk.data import AnswerEncoder, DataRow, Pair, PairFields, PromptDataset, answer_notes, lookup, missing_field
from rlsdk.interfaces import Batch, DataError
from rlsdk.trainer.inputs.answers import AnswerSettings
from rlsdk.trainer.learner.mini_batches import make_sft_batch


@dataclass(frozen=True, kw_only=True)
class PairSettings:
    """The field of a pair's margin, and how answers are tokenized."""

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
    notes: Sequence[str] = ()
    """What else is to be said about the answers: see `answer_notes`."""

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
        return "; ".join([text, *(f"answers: {note}" for note in self.notes)])


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

    def mismatched(self, pairs: Sequence[int]) -> None:
        """Pairs need no estimate of a divergence."""

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


def encode_pairs(prompts: PromptDataset, tokenizer: Any, settings: PairSettings) -> PairSet:
    """Tokenizes the pairs; leaves out those that cannot be trained on.

    Raises:
        DataError: an answer cannot be encoded, a margin is none, or no pair is left; names the row.
    """
    rows, form = prompts.rows, settings.answers.form
    pairs = [_pair(row) for row in rows]
    encoder = AnswerEncoder(tokenizer, settings.answers.max_tokens, settings.answers.ends, form=form)
    chosen = encoder.encode_replies(rows, [pair.chosen for pair in pairs], settings.answers.template)
    rejected = encoder.encode_replies(rows, [pair.rejected for pair in pairs], settings.answers.template)
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
        notes=answer_notes(
            [*chosen, *rejected], [row.source for row in [*rows, *rows]], special_allowed=form.allow_special_tokens
        ),
    )
    if not kept:
        fields = form.pair or PairFields(chosen="chosen", rejected="rejected")
        raise DataError(
            f"no pair is left to learn from: {report.line()}; name other fields in preferences.chosen_field "
            f"{fields.chosen!r} and preferences.rejected_field {fields.rejected!r}, raise "
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


def _pair(row: DataRow) -> Pair:
    assert row.pair is not None, "prompt_format(config, of_pairs=True) reads the pairs"
    return row.pair


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
