"""Stop strings: found in the text of the newest tokens, also across token boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from rlsdk.interfaces import ModelSpec
from rlsdk.kit.hf import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BYTES_PER_CHARACTER = 4
"""At most, in UTF-8; a token of a byte-level vocabulary may be a single byte."""
CONTEXT = 4
"""Tokens before the window that are decoded with it: some tokenizers drop a space at the start of a text."""


class StopText:
    """Reads the tokenizer of a model when it is first needed."""

    def __init__(self, model: ModelSpec) -> None:
        self.model = model

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Raises: ConfigError: the model has none."""
        model = self.model
        return load_tokenizer(model.path, revision=model.revision, trust_remote_code=model.trust_remote_code)

    def window(self, strings: Sequence[str]) -> int:
        """Newest tokens among which the strings can end: each stands for one byte at least."""
        return BYTES_PER_CHARACTER * max(len(string) for string in strings) + CONTEXT

    def ends(self, strings: Sequence[str], token_ids: Sequence[int]) -> bool:
        """True where one of the strings stands in the text of these tokens, the newest of a response."""
        text = self.tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
        return any(string in text for string in strings)

    def ended(self, strings: Sequence[str], token_ids: Sequence[int], before: Sequence[int] = ()) -> bool:
        """True where the newest of a response's tokens end it: one of the strings, if there are any, has come.

        Args:
            strings: what ends it.
            token_ids: of the response.
            before: tokens of the response in front of those: a string may begin there.
        """
        if not strings or len(token_ids) == 0:
            return False
        window = self.window(strings)
        newest = token_ids[-window:]
        if before and len(newest) < window:
            newest = [*before[len(newest) - window :], *newest]
        return self.ends(strings, newest)

    def prepare(self, strings: Sequence[str]) -> None:
        """Raises: ConfigError: strings are wanted, and the model has no tokenizer."""
        if strings:
            _ = self.tokenizer
