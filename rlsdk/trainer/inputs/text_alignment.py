"""Teachers with a tokenizer of their own: they read their own tokens of the same text, and their log-probs are shared
out over the policy's tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from rlsdk.algorithms.distillation import shared_out
from rlsdk.interfaces import Batch, BatchError
from rlsdk.trainer.inputs.teacher_tokenizers import token_bytes

BOUNDARIES = "boundaries"
"""Output beside `log_probs`: whether a token ends where one of the teacher's does."""


@dataclass(frozen=True, kw_only=True)
class TextReader:
    """How a teacher reads the text of a response."""

    meant: Mapping[int, bytes]
    """Bytes of each of the policy's tokens."""
    stops: frozenset[int]
    """The policy's tokens that end a response."""
    tokenize: Callable[[str], Sequence[int]]
    """Tokens that the teacher has for a text."""
    theirs: Mapping[int, bytes]
    """Bytes of each of the teacher's tokens."""
    end: int
    """The teacher's token that ends a response."""

    @classmethod
    def of(cls, policy: Any, stops: Sequence[int], teacher: Any, end: int) -> TextReader:
        """Of two tokenizers; `end`: the teacher's token that ends a response."""
        return cls(
            meant=token_bytes(policy),
            stops=frozenset(stops),
            tokenize=lambda text: list(teacher(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]),
            theirs=token_bytes(teacher),
            end=end,
        )

    def read(self, response: Sequence[int]) -> Reading:
        """The teacher's tokens of a response, and where tokens of both end.

        Bytes that are no text, as where a response was cut within a character, are not read, and neither is what
        follows them; the end of a response is the teacher's own end.
        """
        body = response[:-1] if response and response[-1] in self.stops else response
        pieces = [self.meant.get(token) for token in body]
        known = pieces[: pieces.index(None)] if None in pieces else pieces
        joined = b"".join(piece for piece in known if piece is not None)
        text = _valid(joined)
        tokens = list(self.tokenize(text))
        theirs = _ends([self.theirs.get(token, b"") for token in tokens])
        size = len(text.encode())
        if theirs and theirs[-1] == size + 1 and self.theirs[tokens[0]].startswith(b" ") and not text.startswith(" "):
            theirs = [end - 1 for end in theirs]  # A space that its tokenizer puts in front of every text.
        if (theirs[-1] if theirs else 0) != size:
            return Reading(tokens=(), ends=(), policy_ends=())  # It normalizes the text: what it reads is another one.
        ours = [end for end in _ends([piece or b"" for piece in known]) if end <= size]
        if len(body) < len(response) and len(ours) == len(body):
            tokens, theirs, ours = [*tokens, self.end], [*theirs, size + 1], [*ours, size + 1]
        return Reading(tokens=tuple(tokens), ends=tuple(theirs), policy_ends=tuple(ours))


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A response as a teacher reads it."""

    tokens: Sequence[int]
    ends: Sequence[int]
    """Bytes up to the end of each of its tokens."""
    policy_ends: Sequence[int]
    """The same of the policy's tokens, of the first ones of the response: as many as it can read."""


def _ends(pieces: Sequence[bytes]) -> list[int]:
    return list(accumulate(map(len, pieces)))


def _valid(joined: bytes) -> str:
    """The text up to the first byte that is none."""
    try:
        return joined.decode()
    except UnicodeDecodeError as error:
        return joined[: error.start].decode()


@dataclass(frozen=True)
class OwnText:
    """What a teacher with a tokenizer of its own reads in a step."""

    reader: TextReader
    prompts: Mapping[int, tuple[Sequence[int], Sequence[int]]]
    """Ordinal of a group (`uid`) -> tokens of the policy's prompt, and of the teacher's."""

    def read(self, batch: Batch) -> Batch:
        """The rows in the teacher's tokens: its prompt, and its tokens of the response.

        Raises:
            BatchError: a row is something else than a prompt and one response.
        """
        ids, masks = [], []
        for row in range(batch.num_rows):
            own, response = self.prompts[int(batch["uid"][row])][1], self._reading(batch, row)
            ids.append([*own, *response.tokens])
            masks.append(torch.tensor([False] * len(own) + [True] * len(response.tokens)))
        made = Batch.from_rows(ids, row_id=batch["row_id"], uid=batch["uid"])
        return replace(made, meta=batch.meta).with_tokens(response_mask=torch.cat(masks))

    def back(self, batch: Batch, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of the policy's rows: `log_probs` `[N]`, NaN where the teacher read nothing; and `BOUNDARIES` `[N]`.

        Args:
            batch: the policy's, with `old_log_probs`, in proportion to which a part is shared out.
            found: `log_probs` of the teacher's rows.

        Raises:
            BatchError: one of the teacher's is not finite.
        """
        given = torch.full((batch.num_tokens,), float("nan"))
        boundaries = torch.zeros(batch.num_tokens, dtype=torch.bool)
        at = 0
        for row in range(batch.num_rows):
            policy, own = self.prompts[int(batch["uid"][row])]
            reading, start = self._reading(batch, row), int(batch.offsets[row]) + len(policy)
            theirs = found["log_probs"][at + len(own) : at + len(own) + len(reading.tokens)]
            at += len(own) + len(reading.tokens)
            if not theirs.isfinite().all():
                raise BatchError(
                    f"row_id {int(batch['row_id'][row])}: {int((~theirs.isfinite()).sum())} tokens of the teacher "
                    "have no finite log-prob; its dtype may be too narrow (`dtype: float32` of this teacher)"
                )
            part = slice(start, start + len(reading.policy_ends))
            given[part], boundaries[part] = shared_out(
                theirs, torch.tensor(reading.ends), batch["old_log_probs"][part], torch.tensor(reading.policy_ends)
            )
        return {"log_probs": given, BOUNDARIES: boundaries}

    def _reading(self, batch: Batch, row: int) -> Reading:
        start, end = int(batch.offsets[row]), int(batch.offsets[row + 1])
        policy = self.prompts[int(batch["uid"][row])][0]
        ids, mask = batch["input_ids"][start:end], batch["response_mask"][start:end]
        if ids[: len(policy)].tolist() != list(policy) or not bool(mask[len(policy) :].all()):
            raise BatchError(
                f"row_id {int(batch['row_id'][row])} (uid {int(batch['uid'][row])}) is not its prompt and a response: "
                "a teacher with align 'text' cannot read it: conversations with tools and several turns need one "
                "with the policy's tokenizer"
            )
        return self.reader.read(ids[len(policy) :].tolist())
