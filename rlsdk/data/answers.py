"""Reference answers as tokens, for supervised training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rlsdk.data.control_tokens import LiteralEncoder
from rlsdk.data.prompts import TOKENIZER_BATCH, longest_token


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One tokenized answer."""

    token_ids: tuple[int, ...]
    """Token ids, including the end-of-sequence token unless the answer was cut."""
    cut: bool
    """Whether it was longer than the limit: only its first tokens, without end-of-sequence token, which would teach the
    model to stop early."""


@dataclass(frozen=True, kw_only=True)
class AnswerReport:
    """Counts of the answers of a data set."""

    num_answers: int
    num_long: int
    """Number of answers longer than `max_tokens`."""
    max_tokens: int
    """Limit in tokens, including the end-of-sequence token."""
    long_answers: Literal["drop", "cut"]
    examples: Sequence[str] = field(default=())
    """The first few long answers, as `file:line`."""

    def line(self) -> str:
        """The report on one line."""
        text = f"{self.num_answers - (self.num_long if self.long_answers == 'drop' else 0):,} of {self.num_answers:,} "
        text += "answers are learned"
        if self.num_long:
            what = "left out" if self.long_answers == "drop" else "cut, without an end-of-sequence token"
            text += f"; {self.num_long:,} longer than {self.max_tokens:,} tokens {what} (first {self.examples[0]})"
        return text


class AnswerEncoder:
    """Turns answers into tokens."""

    def __init__(self, tokenizer: Any, max_tokens: int, *, allow_special_tokens: bool = False) -> None:
        """Prepares encoding with one tokenizer.

        Args:
            tokenizer: of the policy, with an end-of-sequence token.
            max_tokens: most tokens of an answer, including the end-of-sequence token; at least 1.
            allow_special_tokens: special tokens in an answer are control tokens; False: encoded as text.
        """
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._literal = None if allow_special_tokens else LiteralEncoder(tokenizer)
        self._longest_token = longest_token(tokenizer)

    def encode(self, texts: Sequence[str], sources: Sequence[str]) -> list[Answer]:
        """Encodes answers: each one's tokens and the end-of-sequence token, or its first `max_tokens` tokens if it is
        longer.

        Args:
            texts: answers, in their template.
            sources: where each came from, for messages.

        Raises:
            DataError: a text holds a special token that this tokenizer cannot encode as text; names its source.
        """
        # Of a text that is too long by its number of characters, only what can be needed is tokenized.
        most = (self._max_tokens + 1) * self._longest_token
        ids = self._ids([text[:most] for text in texts], sources)
        end = int(self._tokenizer.eos_token_id)
        answers = []
        for text, found in zip(texts, ids, strict=True):
            whole = len(found) < self._max_tokens and len(text) <= most
            answers.append(
                Answer(token_ids=(*found, end) if whole else tuple(found[: self._max_tokens]), cut=not whole)
            )
        return answers

    def _ids(self, texts: Sequence[str], sources: Sequence[str]) -> list[list[int]]:
        found: dict[int, list[int]] = {}
        if (literal := self._literal) is not None:
            for at, (text, source) in enumerate(zip(texts, sources, strict=True)):
                if literal.found_in(text):
                    found[at] = literal.encode(literal.hide(text), add_special_tokens=False, where=source)
        plain = [at for at in range(len(texts)) if at not in found]
        for start in range(0, len(plain), TOKENIZER_BATCH):
            part = plain[start : start + TOKENIZER_BATCH]
            encoded = self._tokenizer([texts[at] for at in part], add_special_tokens=False)["input_ids"]
            found |= {at: [int(token) for token in ids] for at, ids in zip(part, encoded, strict=True)}
        return [found[at] for at in range(len(texts))]


def answer_report(
    answers: Sequence[Answer], sources: Sequence[str], max_tokens: int, long_answers: Literal["drop", "cut"]
) -> AnswerReport:
    """Counts what `long_answers` leaves out or cuts; `sources` names where each answer came from."""
    long = [source for answer, source in zip(answers, sources, strict=True) if answer.cut]
    return AnswerReport(
        num_answers=len(answers),
        num_long=len(long),
        max_tokens=max_tokens,
        long_answers=long_answers,
        examples=tuple(long[:3]),
    )
