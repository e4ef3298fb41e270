"""Reference answers as tokens, for supervised training."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rlsdk.data.control_tokens import LiteralEncoder
from rlsdk.data.messages import answer_turn, content_text, own_fields
from rlsdk.data.prompts import TOKENIZER_BATCH, longest_token
from rlsdk.data.render import PromptFormat, Template
from rlsdk.data.rows import DataRow, JsonValue, Reply
from rlsdk.interfaces import DataError


@dataclass(frozen=True, kw_only=True)
class AnswerEnds:
    """The tokens that end an answer."""

    learned: int
    """The one that is appended to a text."""
    stops: Collection[int]
    """Those at which a response ends; `learned` is one of them."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One tokenized answer."""

    token_ids: tuple[int, ...]
    """Token ids, including the token that ends a turn unless the answer was cut."""
    cut: bool
    """Whether it was longer than the limit: only its first tokens, without the end, which would teach the model to stop
    early."""
    special: bool = False
    """Whether its text contains a special token of the tokenizer."""
    unread: Sequence[str] = ()
    """Fields of its message that the chat template does not show."""


@dataclass(frozen=True, kw_only=True)
class AnswerReport:
    """Counts of the answers of a data set."""

    num_answers: int
    num_long: int
    """Number of answers longer than `max_tokens`."""
    max_tokens: int
    """Limit in tokens, including the token that ends a turn."""
    long_answers: Literal["drop", "cut"]
    examples: Sequence[str] = field(default=())
    """The first few long answers, as `file:line`."""
    notes: Sequence[str] = ()
    """What else is to be said about the answers: see `answer_notes`."""

    def line(self) -> str:
        """The report on one line."""
        text = f"{self.num_answers - (self.num_long if self.long_answers == 'drop' else 0):,} of {self.num_answers:,} "
        text += "answers are learned"
        if self.num_long:
            what = "left out" if self.long_answers == "drop" else "cut, without an end-of-sequence token"
            text += f"; {self.num_long:,} longer than {self.max_tokens:,} tokens {what} (first {self.examples[0]})"
        return "; ".join([text, *self.notes])


class AnswerEncoder:
    """Turns answers into tokens."""

    def __init__(self, tokenizer: Any, max_tokens: int, ends: AnswerEnds, *, form: PromptFormat | None = None) -> None:
        """Prepares encoding with one tokenizer.

        Args:
            tokenizer: of the policy.
            max_tokens: most tokens of an answer, including the token that ends it; at least 1.
            ends: the tokens that end an answer.
            form: of the prompts. Its chat template renders answers that are messages; with `allow_special_tokens`,
                special tokens in an answer are control tokens, otherwise they are encoded as text.
        """
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._ends = ends
        self._form = form or PromptFormat()
        self._special = LiteralEncoder(tokenizer)
        self._literal = None if self._form.allow_special_tokens else self._special
        self._longest_token = longest_token(tokenizer)
        self._template = self._form.template(tokenizer) if self._form.uses_chat_template(tokenizer) else None

    def encode(self, texts: Sequence[str], sources: Sequence[str]) -> list[Answer]:
        """Encodes texts: each one's tokens and the end of the turn, or its first `max_tokens` tokens if it is longer.

        Args:
            texts: answers, in their template.
            sources: where each came from, for messages.

        Raises:
            DataError: a text holds a special token that this tokenizer cannot encode as text; names its source.
        """
        # Of a text that is too long by its number of characters, only what can be needed is tokenized.
        most = (self._max_tokens + 1) * self._longest_token
        ids = self._ids([text[:most] for text in texts], sources)
        return [
            self._cut([*tokens, self._ends.learned], special=self._special.found_in(text), whole=len(text) <= most)
            for text, tokens in zip(texts, ids, strict=True)
        ]

    def encode_replies(self, rows: Sequence[DataRow], replies: Sequence[Reply], template: str) -> list[Answer]:
        """Encodes answers to the prompts of selected rows.

        A text is encoded as by `encode`. A message is what the chat template adds for it to the prompt, up to the token
        that ends the turn: `tool_calls` and other fields that the template reads are part of it.

        Args:
            rows: as `PromptFormat.select` gave them.
            replies: the answer to each.
            template: text with `{answer}`, for the text of an answer.

        Raises:
            DataError: a message that the chat template refuses, or fields of it without a chat template; names the row.
        """
        filled = [_filled(reply, row, template) for row, reply in zip(rows, replies, strict=True)]
        texts = {at: reply for at, reply in enumerate(filled) if isinstance(reply, str)}
        encoded = dict(zip(texts, self.encode([*texts.values()], [rows[at].source for at in texts]), strict=True))
        for at, reply in enumerate(filled):
            if not isinstance(reply, str):
                encoded[at] = self._encode_message(rows[at], reply)
        return [encoded[at] for at in range(len(rows))]

    def _encode_message(self, row: DataRow, message: Mapping[str, JsonValue]) -> Answer:
        special = self._special.found_in(message)
        text = self._added_text(row, message)
        if text is None:
            if own := own_fields(message):
                raise DataError(
                    f"{row.source}: the fields {own} of the answer cannot be learned: "
                    + ("no chat template is in use" if self._template is None else
                       "the chat template changes the prompt where an answer follows it")
                    + ". Leave them out, or take a tokenizer whose chat template shows them"
                )  # fmt: skip
            return replace(self.encode([content_text(message)], [row.source])[0], special=special)
        assert self._template is not None
        turns = [*self._form.messages(row), message]
        unread = self._template.unread(turns, row.tools, row.source, since=len(turns) - 1)
        if special and self._literal is not None:
            text = self._added_text(self._form.hide(row, self._literal), self._literal.hide(message))
            ids = self._literal.encode(text or "", add_special_tokens=False, where=row.source)
        else:
            ids = self._tokenizer([text], add_special_tokens=False)["input_ids"][0]
        end = next((at for at, token in enumerate(ids) if token in self._ends.stops), len(ids))
        ended = [*map(int, ids[: end + 1])] if end < len(ids) else [*map(int, ids), self._ends.learned]
        return replace(self._cut(ended, special=special), unread=tuple(unread))

    def _added_text(self, row: DataRow, message: Mapping[str, JsonValue]) -> str | None:
        """What the chat template adds to the prompt for an answer; None: it adds nothing at its end, or there is no
        template."""
        if self._template is None:
            return None
        turns = self._form.messages(row)
        prompt = self._template.render(turns, row.tools, row.source, opens_answer=True)
        whole = self._template.render([*turns, message], row.tools, row.source, opens_answer=False)
        if not whole.startswith(prompt):
            return None
        added = whole.removeprefix(prompt)
        return added.removesuffix(self._template.ending) if self._template.end is None else added

    def _cut(self, ids: Sequence[int], *, special: bool, whole: bool = True) -> Answer:
        """An answer of these tokens, the last of which ends it; without it, if they are more than the limit."""
        whole = whole and len(ids) <= self._max_tokens
        kept = ids if whole else ids[:-1][: self._max_tokens]
        return Answer(token_ids=tuple(kept), cut=not whole, special=special)

    def _ids(self, texts: Sequence[str], sources: Sequence[str]) -> list[list[int]]:
        ids_of: dict[int, list[int]] = {}
        if (literal := self._literal) is not None:
            for at, (text, source) in enumerate(zip(texts, sources, strict=True)):
                if literal.found_in(text):
                    ids_of[at] = literal.encode(literal.hide(text), add_special_tokens=False, where=source)
        plain = [at for at in range(len(texts)) if at not in ids_of]
        for start in range(0, len(plain), TOKENIZER_BATCH):
            part = plain[start : start + TOKENIZER_BATCH]
            encoded = self._tokenizer([texts[at] for at in part], add_special_tokens=False)["input_ids"]
            ids_of |= {at: [int(token) for token in ids] for at, ids in zip(part, encoded, strict=True)}
        return [ids_of[at] for at in range(len(texts))]


def _filled(reply: Reply, row: DataRow, template: str) -> Reply:
    if isinstance(reply, str):
        return Template(template).fill(row, answer=reply)
    if template == "{answer}":
        return reply
    return {**reply, "content": Template(template).fill(row, answer=content_text(reply))}


def learned_reply(row: DataRow, field: str) -> Reply | None:
    """The answer of a selected row, as it is learned; None: it has none.

    Raises:
        DataError: it is several messages, or not the assistant's; names the row.
    """
    return row.answer if row.reply is None else answer_turn(row.reply, row.source, f"answer field {field!r}")


def answer_notes(answers: Sequence[Answer], sources: Sequence[str], *, special_allowed: bool) -> list[str]:
    """What is to be said about answers: how many contain special tokens, or fields that the model does not see."""
    notes = []
    if special := [source for answer, source in zip(answers, sources, strict=True) if answer.special]:
        became = "kept as control tokens" if special_allowed else "encoded as text"
        notes.append(f"{len(special):,} with special tokens in the text, {became} (first {special[0]})")
    unread: dict[str, list[str]] = {}
    for answer, source in zip(answers, sources, strict=True):
        for name in answer.unread:
            unread.setdefault(name, []).append(source)
    return notes + [
        f"{len(found):,} with {name!r}, which the chat template does not show (first {found[0]})"
        for name, found in unread.items()
    ]


def answer_report(
    answers: Sequence[Answer],
    sources: Sequence[str],
    max_tokens: int,
    long_answers: Literal["drop", "cut"],
    *,
    special_allowed: bool = False,
) -> AnswerReport:
    """Counts what `long_answers` leaves out or cuts; `sources` names where each answer came from."""
    long = [source for answer, source in zip(answers, sources, strict=True) if answer.cut]
    return AnswerReport(
        num_answers=len(answers),
        num_long=len(long),
        max_tokens=max_tokens,
        long_answers=long_answers,
        examples=tuple(long[:3]),
        notes=answer_notes(answers, sources, special_allowed=special_allowed),
    )
