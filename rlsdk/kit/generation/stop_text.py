"""Finds stop strings in the text of the newest tokens, also across token boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from rlsdk.interfaces import ModelSpec
from rlsdk.kit.model.hf import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BYTES_PER_CHARACTER = 4
"""Most bytes of a character in UTF-8; a token of a byte-level vocabulary may be a single byte."""
CONTEXT = 4
"""Tokens before the window that are decoded with it, because some tokenizers drop a space at the start of a text."""


class StopText:
    """Finds stop strings; loads the model's tokenizer on first use."""

    def __init__(self, model: ModelSpec) -> None:
        self.model = model

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer. Raises `ConfigError` if the model has none."""
        model = self.model
        return load_tokenizer(model.path, revision=model.revision, trust_remote_code=model.trust_remote_code)

    def window(self, strings: Sequence[str]) -> int:
        """Number of newest tokens that can contain the strings: each token is at least one byte."""
        return BYTES_PER_CHARACTER * max(len(string) for string in strings) + CONTEXT

    def ends(self, strings: Sequence[str], token_ids: Sequence[int]) -> bool:
        """Whether the text of these tokens, the newest of a response, contains one of the strings."""
        text = self.tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
        return any(string in text for string in strings)

    def ended(self, strings: Sequence[str], token_ids: Sequence[int], before: Sequence[int] = ()) -> bool:
        """Whether the newest tokens of a response complete one of the strings.

        Args:
            strings: stop strings; may be empty.
            token_ids: of the response.
            before: tokens of the response before these, in which a string may begin.
        """
        if not strings or len(token_ids) == 0:
            return False
        window = self.window(strings)
        newest = token_ids[-window:]
        if before and len(newest) < window:
            newest = [*before[len(newest) - window :], *newest]
        return self.ends(strings, newest)

    def prepare(self, strings: Sequence[str]) -> None:
        """Loads the tokenizer if there are strings. Raises `ConfigError` if the model has none."""
        if strings:
            _ = self.tokenizer
