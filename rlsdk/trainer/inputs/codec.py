"""Converts between token ids and text with the policy's tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlsdk.rollouts.groups.rollouter import Tokens

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What a decoder returns for an incomplete character."""


class TokenCodec:
    """Satisfies `rlsdk.rollouts.Codec`. Decoded text shows special tokens: without them, a response that they spoil
    would look correct. In text to encode, special tokens are plain text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return ids

    def decode(self, token_ids: Tokens) -> str:
        return self.decode_all([token_ids])[0]

    def decode_all(self, token_ids: Sequence[Tokens]) -> list[str]:
        rows = [ids.tolist() if isinstance(ids, np.ndarray) else list(ids) for ids in token_ids]
        if self._tokenizer.is_fast and not self._tokenizer.clean_up_tokenization_spaces:
            # What `batch_decode` amounts to; decoding row by row takes ten times as long.
            texts: list[str] = self._tokenizer.backend_tokenizer.decode_batch(rows, skip_special_tokens=False)
        else:
            texts = [self._tokenizer.decode(ids, skip_special_tokens=False) for ids in rows]
        return texts

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Text that each token adds; joined, the pieces are the whole text. If a character has several tokens, its last
        token adds it, and the others add nothing."""
        whole = self.decode(token_ids)
        alone = self.decode_all([[token] for token in token_ids])
        if "".join(alone) == whole:
            return alone
        # Characters of several tokens, or spaces that depend on the preceding token: decode each token together with
        # the last complete piece, as in streaming decoding.
        pieces, begin, end = [], 0, 0
        for at in range(1, len(token_ids) + 1):
            before, now = self.decode_all([token_ids[begin:end], token_ids[begin:at]])
            if now.endswith(REPLACEMENT) and at < len(token_ids):
                pieces.append("")
                continue
            pieces.append(now[len(before) :])
            begin, end = end, at
        return pieces
