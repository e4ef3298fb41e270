"""Where the steps of a solution end, in tokens: for what a process reward model learns, and for what it scores."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from rlsdk.interfaces import Batch
from rlsdk.trainer.inputs.codec import TokenCodec


@dataclass(frozen=True, kw_only=True)
class StepReader:
    """Finds the ends of steps.

    A step ends with the token in which its separator ends, or, without one, with the last token of the response before
    the token that ends it. A response that was cut has no end of its last step. Blank steps are none.
    """

    tokenizer: Any
    separator: str
    stops: Collection[int]
    """Tokens that end a response."""

    def ends(self, ids: Sequence[int], *, is_followed: bool) -> list[int]:
        """Positions in `ids` of the last token of each step.

        Args:
            ids: tokens of a response, or of one turn of it.
            is_followed: whether the row goes on after them. A step is scored at the token after its end, so without
                one a step that ends with the last token is left out.
        """
        body = self._body(ids)
        pieces = TokenCodec(self.tokenizer).pieces(body)
        text, upto = "".join(pieces), [*accumulate(map(len, pieces))]
        found: list[int] = []
        begin = at = 0
        while (place := text.find(self.separator, at)) >= 0:
            at = place + len(self.separator)
            if text[begin:place].strip():
                found.append(bisect_left(upto, at))
                begin = at
        if text[begin:].strip():
            found.append(len(body) - 1)
        is_followed = is_followed or len(body) < len(ids)
        return [end for end in dict.fromkeys(found) if is_followed or end < len(body) - 1]

    def ends_of(self, texts: Sequence[str], ids: Sequence[int]) -> list[int | None]:
        """Positions in the tokens of `separator.join(texts)` at which each text ends; None: they were cut before it.

        Returns an empty list where the tokens hold another text, so that ends cannot be told.
        """
        body = self._body(ids)
        pieces = TokenCodec(self.tokenizer).pieces(body)
        whole, upto = self.separator.join(texts), [*accumulate(map(len, pieces))]
        if "".join(pieces) != (whole if len(body) < len(ids) else whole[: upto[-1] if upto else 0]):
            return []
        last, gap = len(texts) - 1, len(self.separator)
        chars = accumulate(len(text) + (gap if at < last else 0) for at, text in enumerate(texts))
        found = [bisect_left(upto, char) for char in chars]
        return [end if end + 1 < len(ids) else None for end in found]

    def mark(self, batch: Batch) -> Tensor:
        """`[N]` bool: the last token of each step of a batch with `response_mask`. The token after it is of its row."""
        found = torch.zeros(batch.num_tokens, dtype=torch.bool)
        for start, stop in zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True):
            sampled = batch["response_mask"][start:stop].tolist()
            ids = batch["input_ids"][start:stop].tolist()
            for begin, end in _runs(sampled):
                for at in self.ends(ids[begin:end], is_followed=end < len(ids)):
                    found[start + begin + at] = True
        return found

    def _body(self, ids: Sequence[int]) -> Sequence[int]:
        return ids[:-1] if ids and ids[-1] in self.stops else ids


def _runs(mask: Sequence[bool]) -> list[tuple[int, int]]:
    """First position and end of each run of true values."""
    edges = [at for at in range(len(mask) + 1) if (at < len(mask) and mask[at]) != (at > 0 and mask[at - 1])]
    return list(zip(edges[::2], edges[1::2], strict=True))
