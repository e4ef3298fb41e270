"""Tokenizes the labelled answers that `rlsdk kto` trains on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlsdk.algorithms import label_weights
from rlsdk.data import DataRow, PromptDataset, lookup, missing_field
from rlsdk.data.rows import JsonValue
from rlsdk.interfaces import Batch, DataError
from rlsdk.trainer.inputs.answers import AnswerSettings, learned_answers
from rlsdk.trainer.learner.mini_batches import make_sft_batch

FIELD = "preferences.label_field"
_LABELS: Mapping[str, bool] = {"true": True, "false": False, "1": True, "0": False}
"""Labels as texts, for CSV files."""
ADVISED_RATIO = (1.0, 4 / 3)
"""Desirable to undesirable answers, each times its weight: the range that the paper of KTO advises."""


@dataclass(frozen=True, kw_only=True)
class LabelledSet:
    """Labelled answers, numbered from 0."""

    positions: Sequence[int]
    """Index of each answer's prompt in the given prompts."""
    prompts: Sequence[Sequence[int]]
    """Tokens of each prompt."""
    answers: Sequence[Sequence[int]]
    """Tokens of each answer."""
    desirable: Sequence[bool]

    def __len__(self) -> int:
        return len(self.prompts)

    def batch(self, rows: Sequence[int]) -> Batch:
        """Batch with one row per answer; `uid` is the position in `rows`. Has `response_mask`, `chosen` (desirable) and
        `row_weight`."""
        batch = make_sft_batch([self.prompts[at] for at in rows], [self.answers[at] for at in rows])
        desirable = torch.tensor([self.desirable[at] for at in rows], dtype=torch.bool)
        return label_weights(batch.with_rows(uid=torch.arange(len(rows)), chosen=desirable))

    def mismatched(self, rows: Sequence[int]) -> Batch:
        """Batch of each prompt with the answer to the one before it; the first prompt has the last answer."""
        shifted = [*rows[-1:], *rows[:-1]]
        batch = make_sft_batch([self.prompts[at] for at in rows], [self.answers[at] for at in shifted])
        return batch.with_rows(uid=torch.arange(len(rows)))

    def line(self, desirable_weight: float, undesirable_weight: float) -> str:
        """How many answers have each label, and whether the weights are those that the paper advises."""
        good, bad = sum(self.desirable), len(self) - sum(self.desirable)
        text = f"{good:,} desirable and {bad:,} undesirable answers"
        least, most = ADVISED_RATIO
        if not good or not bad:
            return f"{text}: without both kinds, the loss only moves all answers in one direction"
        ratio = good * desirable_weight / (bad * undesirable_weight) if undesirable_weight else float("inf")
        if not least * 0.995 <= ratio <= most * 1.005:
            return (
                f"{text}; times their weights, {ratio:.3g} to 1. The paper advises {least:g} to {most:.3g}: "
                f"preferences.desirable_weight {bad * undesirable_weight / good:.3g}, or "
                f"preferences.undesirable_weight {good * desirable_weight / bad:.3g}"
            )
        return text


def encode_labelled(
    prompts: PromptDataset, tokenizer: Any, settings: AnswerSettings, label_field: str, notice: Callable[[str], None]
) -> LabelledSet:
    """Tokenizes the answers and reads their labels.

    Raises:
        DataError: an answer or a label is missing or unusable, or all answers are too long; names the row.
    """
    found = settings.form.answer_name(prompts.rows[0])
    if found == label_field:
        raise DataError(
            f"{prompts.rows[0].source}: field {found!r} holds the labels ({FIELD}), and no other field with answers "
            f"was found; the row has {sorted(prompts.rows[0].row)}. Name theirs in data.answer_field"
        )
    labels = [_label(row, label_field) for row in prompts.rows]
    kept, answers = learned_answers(prompts, tokenizer, settings, notice)
    place = {id(row): at for at, row in enumerate(prompts.rows)}
    positions = [place[id(row)] for row in kept.rows]
    return LabelledSet(
        positions=positions,
        prompts=[prompt.prompt_ids for prompt in kept],
        answers=answers,
        desirable=[labels[at] for at in positions],
    )


def _label(row: DataRow, field: str) -> bool:
    try:
        value: JsonValue = lookup(row.row, field)
    except KeyError:
        raise missing_field(field, row, FIELD, flag=FIELD) from None
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.strip().lower() in _LABELS:
        return _LABELS[value.strip().lower()]
    raise DataError(
        f"{row.source}: field {field!r} ({FIELD}) must be true or false, 1 or 0, got {str(value)[:80]!r}. "
        "For rows with two answers: `rlsdk dpo`"
    )
