"""Between token ids and text, with the policy's tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlsdk.rollouts.rollouter import Tokens

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What a decoder puts for the beginning of a character whose end is missing."""


class TokenCodec:
    """Satisfies `rlsdk.rollouts.Codec`. Special tokens are shown in decoded text, and are plain text in encoded text:
    if they were dropped, a response that a model spoilt with them would look right."""

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
            # What `batch_decode` does in the end; row by row it costs ten times as much.
            texts: list[str] = self._tokenizer.backend_tokenizer.decode_batch(rows, skip_special_tokens=False)
        else:
            texts = [self._tokenizer.decode(ids, skip_special_tokens=False) for ids in rows]
        return texts

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Text that each token adds; joined they are the text of all. A token that ends no character adds nothing, the
        one that ends it adds the whole."""
        whole = self.decode(token_ids)
        alone = self.decode_all([[token] for token in token_ids])
        if "".join(alone) == whole:
            return alone
        # Characters of several tokens, or spaces that depend on what stands before: each token after the last whole
        # one, as text that streams is decoded.
        pieces, begin, end = [], 0, 0
        for at in range(1, len(token_ids) + 1):
            before, now = self.decode_all([token_ids[begin:end], token_ids[begin:at]])
            if now.endswith(REPLACEMENT) and at < len(token_ids):
                pieces.append("")
                continue
            pieces.append(now[len(before) :])
            begin, end = end, at
        return pieces
