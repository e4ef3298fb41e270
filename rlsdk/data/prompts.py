"""Tokenized prompts, and a report of the rows that were dropped."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import overload

import numpy as np
from numpy.typing import NDArray

from rlsdk.data.chat import Tokenizer
from rlsdk.data.control_tokens import LiteralEncoder
from rlsdk.data.messages import ASSISTANT, content_text
from rlsdk.data.mixture import MixturePart, exact_weight
from rlsdk.data.render import PromptFormat, render, unread_fields
from rlsdk.data.rows import DataRow, Fields
from rlsdk.interfaces import DataError, PromptView

TOKENIZER_BATCH = 2048
"""Texts per call of the tokenizer: enough for its threads, small enough for memory."""
MIN_LONGEST_TOKEN = 32
"""Least number of characters assumed for a tokenizer's longest token."""


class NoPromptError(DataError):
    """Every row was dropped."""


@dataclass(frozen=True, kw_only=True)
class Prompt(PromptView):
    """One prompt of a data set, ready for a `GenerationRequest` and, later, a `RewardSample`."""

    index: int
    """Index in its data set, the same in every epoch."""
    source: str
    """Where its row comes from, as `file:line`."""


@dataclass(frozen=True, kw_only=True)
class FilterReport:
    """Counts of dropped and kept rows of a source."""

    num_rows: int
    num_kept: int
    num_empty: int
    """Dropped: no text, or no token."""
    num_too_long: int
    """Dropped: more than `max_prompt_tokens`."""
    num_without_answer: int
    """Kept, but without a reference answer."""
    num_special: int
    """Kept, with special tokens of the tokenizer in the text of the row."""
    special_allowed: bool
    """Whether these became control tokens; False: they were encoded as text."""
    max_prompt_tokens: int | None
    longest_kept: int
    """Tokens of the longest kept prompt."""
    longest: int
    """Tokens of the longest row; a lower bound if a text was too long by its number of characters."""
    num_split: int = 0
    """Kept: conversations whose last turn, the assistant's, is the answer."""
    num_earlier_answers: int = 0
    """Turns of the assistant in prompts of messages: they are read, not learned."""
    unread: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Fields of messages, and the column `tools`, that do not reach the model -> the kept rows that have them, as
    `file:line`."""
    examples: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Reason -> the first few rows that were dropped or counted for it, as `file:line`."""
    found: Fields | None = None
    """The fields that were chosen for want of a name in the configuration, if they are not the usual ones."""

    def line(self) -> str:
        """The report on one line."""
        parts = [f"{self.num_kept:,} of {self.num_rows:,} prompts kept (longest {self.longest_kept:,} tokens)"]
        if self.num_too_long:
            parts.append(
                f"{self.num_too_long:,} longer than {self.max_prompt_tokens:,} tokens "
                f"(up to {self.longest:,}; first {self.examples['too_long'][0]})"
            )
        if self.found is not None:
            answers = "" if self.found.answer == Fields.answer else f", answers in {self.found.answer!r}"
            parts.append(f"prompts found in field {self.found.prompt!r}{answers}")
        if self.num_empty:
            parts.append(f"{self.num_empty:,} empty (first {self.examples['empty'][0]})")
        if self.num_without_answer:
            parts.append(f"{self.num_without_answer:,} without an answer")
        if self.num_special:
            became = "kept as control tokens" if self.special_allowed else "encoded as text"
            first = self.examples["special"][0]
            parts.append(f"{self.num_special:,} with special tokens in the row's text, {became} (first {first})")
        if self.num_split:
            parts.append(f"{self.num_split:,} conversations end in the assistant's turn, which is the answer")
        if self.num_earlier_answers:
            parts.append(f"{self.num_earlier_answers:,} earlier turns of the assistant belong to the prompts")
        parts += [
            f"{len(sources):,} with {name!r}, which the chat template does not show to the model (first {sources[0]})"
            for name, sources in self.unread.items()
        ]
        return "; ".join(parts)


class PromptDataset(Sequence[Prompt]):
    """Prompts in the order of their source. Immutable; `PromptStream` handles order and position.

    Token ids are in one flat int32 array, so memory is proportional to the number of tokens.
    """

    def __init__(
        self,
        rows: Sequence[DataRow],
        tokenizer: Tokenizer,
        form: PromptFormat | None = None,
        *,
        max_prompt_tokens: int | None = None,
        name: str = "data",
    ) -> None:
        """Renders, tokenizes and filters.

        Args:
            rows: as `load_rows` or `split_by_content` gave them.
            tokenizer: of the policy.
            form: the fields and templates of the prompt.
            max_prompt_tokens: longer prompts are dropped and counted; None: no limit.
            name: of this part of the data in messages.

        Raises:
            DataError: a row that cannot be used, with file and line.
            NoPromptError: no prompt was left.
            ConfigError: a system prompt or messages, without a chat template.
        """
        form = form or PromptFormat()
        selected = form.select(rows)
        texts = render(selected, tokenizer, form)
        ids, special = _encode(selected, texts, tokenizer, form, max_prompt_tokens)
        kept, report = _filter(selected, texts, ids, max_prompt_tokens, special, form.allow_special_tokens)
        found = form.chosen_fields(selected)
        self.report = replace(report, found=found, unread=unread_fields([selected[at] for at in kept], tokenizer, form))
        if not kept:
            shortest = min((len(x) for x in ids if len(x)), default=0)
            raise NoPromptError(
                f"{name}: no prompt is left: {self.report.line()}. The shortest has {shortest} tokens; raise "
                f"max_prompt_tokens, or check prompt_field {form.prompt_name(rows[0])!r}"
            )
        self._form = form
        self._rows = [selected[at] for at in kept]
        self._texts = [texts[at] for at in kept]
        self._offsets = np.cumsum([0, *(len(ids[at]) for at in kept)])
        self._ids: NDArray[np.int32] = np.concatenate([ids[at] for at in kept])
        self.parts: tuple[MixturePart, ...] = (MixturePart(name=name, size=len(kept), weight=Fraction(1)),)
        """One part, or those of a mixture in the order of their prompts."""

    @classmethod
    def mix(cls, datasets: Sequence[PromptDataset], weights: Sequence[float], names: Sequence[str]) -> PromptDataset:
        """Combines data sets into one, from which a `PromptStream` draws by weight. `report` is that of the first.

        Raises:
            ConfigError: a weight that is not above zero.
        """
        made = copy.copy(datasets[0])
        made._rows = [row for dataset in datasets for row in dataset._rows]
        made._texts = [text for dataset in datasets for text in dataset._texts]
        made._ids = np.concatenate([dataset._ids for dataset in datasets])
        made._offsets = np.cumsum([0, *(int(n) for dataset in datasets for n in dataset.lengths)])
        made.parts = tuple(
            MixturePart(name=name, size=len(dataset), weight=exact_weight(weight, name))
            for dataset, weight, name in zip(datasets, weights, names, strict=True)
        )
        return made

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...

    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        row = self._rows[at]
        ids = self._ids[self._offsets[at] : self._offsets[at + 1]]
        return Prompt(
            index=at,
            prompt_ids=tuple(ids.tolist()),
            text=self._texts[at],
            answer=row.answer,
            row=row.row,
            messages=tuple(self._form.messages(row)),
            source=row.source,
        )

    def __iter__(self) -> Iterator[Prompt]:
        return (self[at] for at in range(len(self)))

    def subset(self, positions: Sequence[int]) -> PromptDataset:
        """A subset of the prompts in ascending order, with new indices; `report` stays that of the whole."""
        made = copy.copy(self)
        made._rows = [self._rows[at] for at in positions]
        made._texts = [self._texts[at] for at in positions]
        pieces = [self._ids[self._offsets[at] : self._offsets[at + 1]] for at in positions]
        made._offsets = np.cumsum([0, *map(len, pieces)])
        made._ids = np.concatenate([np.zeros(0, np.int32), *pieces])
        made.parts = _parts_of(self.parts, positions)
        return made

    @property
    def lengths(self) -> NDArray[np.int64]:
        """`[len(self)]` int64: tokens of each prompt."""
        return np.diff(self._offsets)

    @property
    def rows(self) -> Sequence[DataRow]:
        """The kept rows."""
        return self._rows

    def fingerprint(self) -> int:
        """63 bits that change when a prompt, an answer or their order does."""
        digest = hashlib.blake2b(self._ids.astype("<i4").tobytes(), digest_size=8)
        digest.update(self._offsets.astype("<i8").tobytes())
        for row in self._rows:
            digest.update(b"\x00" if row.answer is None else b"\x01" + row.answer.encode("utf-8", "surrogatepass"))
        return int.from_bytes(digest.digest(), "big") >> 1


def encode_prompts(rows: Sequence[DataRow], tokenizer: Tokenizer, form: PromptFormat) -> list[NDArray[np.int32]]:
    """Token ids of the prompts of selected rows, as a `PromptDataset` has them.

    Raises:
        DataError: the chat template refuses a row; names file and line.
    """
    return _encode(rows, render(rows, tokenizer, form), tokenizer, form, None)[0]


def _parts_of(parts: Sequence[MixturePart], positions: Sequence[int]) -> tuple[MixturePart, ...]:
    """The parts restricted to the prompts at ascending `positions`; empty parts are dropped."""
    found, start = [], 0
    for part in parts:
        size = sum(start <= at < start + part.size for at in positions)
        if size:
            found.append(replace(part, size=size))
        start += part.size
    return tuple(found)


def _encode(
    rows: Sequence[DataRow], texts: Sequence[str], tokenizer: Tokenizer, form: PromptFormat, limit: int | None
) -> tuple[list[NDArray[np.int32]], list[int]]:
    """Token ids of every row, and the rows that contain special tokens.

    Texts that are too long by their number of characters are not tokenized: they get a lower bound of tokens, all 0.
    """
    most_chars = longest_token(tokenizer)
    literal = LiteralEncoder(tokenizer)
    add_special_tokens = not form.uses_chat_template(tokenizer)
    ids: dict[int, NDArray[np.int32]] = {}
    special: list[int] = []
    literally: dict[int, DataRow] = {}
    for at, (row, text) in enumerate(zip(rows, texts, strict=True)):
        if limit is not None and len(text) > most_chars * (limit + 1):
            ids[at] = np.zeros(len(text) // most_chars, np.int32)
        elif form.holds_special_tokens(row, literal):
            special.append(at)
            if not form.allow_special_tokens:
                literally[at] = form.hide(row, literal)
    for at, hidden in zip(literally, render([*literally.values()], tokenizer, form), strict=True):
        found = literal.encode(hidden, add_special_tokens=add_special_tokens, where=rows[at].source)
        ids[at] = np.asarray(found, np.int32)
    plain = [at for at in range(len(rows)) if at not in ids]
    encoded = _tokenize([texts[at] for at in plain], tokenizer, add_special_tokens=add_special_tokens)
    ids |= dict(zip(plain, encoded, strict=True))
    if add_special_tokens and ids and _ends_texts(tokenizer):
        # Strip the trailing end token that some tokenizers add, so that the model continues the prompt.
        ids = {at: row[:-1] for at, row in ids.items()}
    return [ids[at] for at in range(len(rows))], special


def longest_token(tokenizer: Tokenizer) -> int:
    """Characters of the longest token: a text of n characters has at least n / longest tokens, unless the tokenizer
    drops text."""
    vocabulary: dict[str, int] = getattr(tokenizer, "get_vocab", dict)()
    return max(MIN_LONGEST_TOKEN, *map(len, vocabulary)) if vocabulary else MIN_LONGEST_TOKEN


def _tokenize(texts: Sequence[str], tokenizer: Tokenizer, *, add_special_tokens: bool) -> list[NDArray[np.int32]]:
    ids: list[NDArray[np.int32]] = []
    for start in range(0, len(texts), TOKENIZER_BATCH):
        part = list(texts[start : start + TOKENIZER_BATCH])
        encoded = tokenizer(part, add_special_tokens=add_special_tokens)["input_ids"]
        ids.extend(np.asarray(row, np.int32) for row in encoded)
    return ids


def _ends_texts(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer appends its end-of-sequence token to every text."""
    bare = tokenizer(["a"], add_special_tokens=False)["input_ids"][0]
    dressed = tokenizer(["a"], add_special_tokens=True)["input_ids"][0]
    end = tokenizer.eos_token_id
    return end is not None and dressed[-1:] == [end] and bare[-1:] != [end]


def _filter(
    rows: Sequence[DataRow],
    texts: Sequence[str],
    ids: Sequence[NDArray[np.int32]],
    limit: int | None,
    special: Sequence[int],
    special_allowed: bool,
) -> tuple[list[int], FilterReport]:
    kept: list[int] = []
    dropped: dict[str, list[str]] = {"empty": [], "too_long": []}
    for at, (row, text, tokens) in enumerate(zip(rows, texts, ids, strict=True)):
        if _is_blank(row, text) or len(tokens) == 0:
            dropped["empty"].append(row.source)
        elif limit is not None and len(tokens) > limit:
            dropped["too_long"].append(row.source)
        else:
            kept.append(at)
    sources = {**dropped, "special": [rows[at].source for at in sorted(set(special) & set(kept))]}
    report = FilterReport(
        num_rows=len(rows),
        num_kept=len(kept),
        num_empty=len(dropped["empty"]),
        num_too_long=len(dropped["too_long"]),
        num_without_answer=sum(rows[at].answer is None for at in kept),
        max_prompt_tokens=limit,
        longest_kept=max((len(ids[at]) for at in kept), default=0),
        longest=max(map(len, ids), default=0),
        num_special=len(sources["special"]),
        special_allowed=special_allowed,
        num_split=sum(rows[at].is_split for at in kept),
        num_earlier_answers=sum(_num_answers(rows[at]) for at in kept),
        examples={reason: tuple(found[:3]) for reason, found in sources.items()},
    )
    return kept, report


def _is_blank(row: DataRow, text: str) -> bool:
    """Whether a prompt is blank. With a chat template the text is never empty, but the message may be."""
    bare = row.prompt if isinstance(row.prompt, str) else "".join(map(content_text, row.prompt))
    return not bare.strip() or not text.strip()


def _num_answers(row: DataRow) -> int:
    """Turns of the assistant in a prompt."""
    return 0 if isinstance(row.prompt, str) else sum(turn["role"] == ASSISTANT for turn in row.prompt)
