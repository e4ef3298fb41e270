"""Tokenizes the solutions in steps that `rlsdk process-reward` trains on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlsdk.algorithms import step_weights
from rlsdk.data import AnswerEncoder, DataRow, PromptDataset, Steps, answer_notes
from rlsdk.interfaces import Batch, DataError
from rlsdk.trainer.inputs.answers import AnswerSettings
from rlsdk.trainer.inputs.step_ends import StepReader
from rlsdk.trainer.learner.mini_batches import make_sft_batch


@dataclass(frozen=True, kw_only=True)
class StepSet:
    """Solutions in steps, numbered from 0."""

    positions: Sequence[int]
    """Index of each solution's prompt in the given prompts."""
    prompts: Sequence[Sequence[int]]
    """Tokens of each prompt."""
    answers: Sequence[Sequence[int]]
    """Tokens of each solution, with the token that ends it."""
    labels: Sequence[Sequence[tuple[int, float]]]
    """Of each solution: position in its tokens at which a labelled step ends, and the label."""
    report: str

    def __len__(self) -> int:
        return len(self.prompts)

    def mismatched(self, rows: Sequence[int]) -> None:
        """Steps need no estimate of a divergence."""

    def batch(self, rows: Sequence[int]) -> Batch:
        """Batch with one row per solution; `uid` is the position in `rows`. Has `response_mask`, `step_labels` and
        `step_weight`, at the token after the end of each labelled step."""
        batch = make_sft_batch([self.prompts[at] for at in rows], [self.answers[at] for at in rows])
        labels = torch.full((batch.num_tokens,), math.nan)
        for start, at in zip(batch.offsets[:-1].tolist(), rows, strict=True):
            for end, label in self.labels[at]:
                labels[start + len(self.prompts[at]) + end + 1] = label
        return step_weights(batch.with_rows(uid=torch.arange(len(rows))).with_tokens(step_labels=labels))


def encode_steps(
    prompts: PromptDataset, tokenizer: Any, settings: AnswerSettings, separator: str, reader: StepReader
) -> StepSet:
    """Tokenizes the solutions and finds the ends of their steps.

    Raises:
        DataError: the ends of a solution's steps cannot be found in its tokens, or no labelled step is left.
    """
    solutions = [_steps(row) for row in prompts.rows]
    encoder = AnswerEncoder(tokenizer, settings.max_tokens, settings.ends, form=settings.form)
    sources = [row.source for row in prompts.rows]
    answers = encoder.encode([separator.join(steps.texts) for steps in solutions], sources)
    labels = [
        _labelled(steps, answer.token_ids, reader, source)
        for steps, answer, source in zip(solutions, answers, sources, strict=True)
    ]
    long = [at for at, answer in enumerate(answers) if answer.cut]
    left_out = {*long} if settings.long_answers == "drop" else set()
    kept = [at for at in range(len(answers)) if labels[at] and at not in left_out]
    learned = [label for at in kept for _, label in labels[at]]
    parts = [f"{len(learned):,} labelled steps of {len(kept):,} solutions"]
    if learned:
        parts[0] += f", mean label {math.fsum(learned) / len(learned):.3f}"
    if long:
        what = "left out" if settings.long_answers == "drop" else "cut"
        parts.append(f"{len(long):,} longer than {settings.max_tokens:,} tokens {what} (first {sources[long[0]]})")
    if inner := [at for at, steps in enumerate(solutions) if any(separator in text.strip() for text in steps.texts)]:
        parts.append(
            f"{len(inner):,} have {separator!r} within a step (first {sources[inner[0]]}), where steps of responses "
            "will end: choose another preferences.step_separator"
        )
    parts += answer_notes(answers, sources, special_allowed=settings.form.allow_special_tokens)
    report = "; ".join(parts)
    if not kept:
        raise DataError(
            f"no labelled step is left: {report}; raise rollout.max_response_tokens {settings.max_tokens}, or set "
            "preferences.long_answers to 'cut'"
        )
    return StepSet(
        positions=kept,
        prompts=[prompts[at].prompt_ids for at in kept],
        answers=[answers[at].token_ids for at in kept],
        labels=[labels[at] for at in kept],
        report=report,
    )


def _steps(row: DataRow) -> Steps:
    assert row.steps is not None, "prompt_format(config, of_steps=True) reads the steps"
    return row.steps


def _labelled(steps: Steps, ids: Sequence[int], reader: StepReader, source: str) -> list[tuple[int, float]]:
    """Where each labelled step ends, and its label.

    Raises:
        DataError: the ends cannot be told from the tokens.
    """
    ends: Sequence[int | None] = reader.ends_of(steps.texts, ids)
    if not ends:
        ends = reader.ends(ids, is_followed=False)
        if len(ends) != len(steps.labels):
            raise DataError(
                f"{source}: {len(steps.labels)} steps have labels, and {len(ends)} are found in the tokens of their "
                f"text, which the tokenizer changes; choose a preferences.step_separator other than "
                f"{reader.separator!r} that it keeps"
            )
    pairs = zip(ends, steps.labels, strict=True)
    return [(end, label) for end, label in pairs if end is not None and label is not None]
