"""Reference answers as tokens: what supervised training learns after a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rlsdk.data.control_tokens import LiteralEncoder
from rlsdk.data.prompts import TOKENIZER_BATCH, longest_token


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer, ready to be learned."""

    token_ids: tuple[int, ...]
    """With the end-of-sequence token, unless it was cut."""
    cut: bool
    """Longer than the limit: its first tokens only, and no end, which would teach the model to stop early."""


@dataclass(frozen=True, kw_only=True)
class AnswerReport:
    """What became of the answers of a data set."""

    num_answers: int
    num_long: int
    """Longer than `max_tokens`."""
    max_tokens: int
    """Tokens, the end-of-sequence token included."""
    long_answers: Literal["drop", "cut"]
    examples: Sequence[str] = field(default=())
    """The first few long ones, as `file:line`."""

    def line(self) -> str:
        """All of it on one line."""
        text = f"{self.num_answers - (self.num_long if self.long_answers == 'drop' else 0):,} of {self.num_answers:,} "
        text += "answers are learned"
        if self.num_long:
            what = "left out" if self.long_answers == "drop" else "cut, without an end-of-sequence token"
            text += f"; {self.num_long:,} longer than {self.max_tokens:,} tokens {what} (first {self.examples[0]})"
        return text


class AnswerEncoder:
    """Turns answers into tokens."""

    def __init__(self, tokenizer: Any, max_tokens: int, *, allow_special_tokens: bool = False) -> None:
        """Prepares for one tokenizer.

        Args:
            tokenizer: of the policy, with an end-of-sequence token.
            max_tokens: most tokens of an answer, the end-of-sequence token included; at least 1.
            allow_special_tokens: special tokens in an answer are control tokens; False: encoded as text.
        """
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._literal = None if allow_special_tokens else LiteralEncoder(tokenizer)
        self._longest_token = longest_token(tokenizer)

    def encode(self, texts: Sequence[str], sources: Sequence[str]) -> list[Answer]:
        """Each answer's tokens and its end, or the first `max_tokens` of them where it is longer.

        Args:
            texts: answers, in their template.
            sources: where each came from, for messages.

        Raises:
            DataError: a text holds a special token that this tokenizer cannot encode as text; names its source.
        """
        # Of a text that is too long by its characters alone, no more than can be needed is tokenized.
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
