"""Builds small tokenizers: one token per character, or per byte."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<eos>", "<unk>")


def write_char_tokenizer(folder: Path, characters: str, *, lowercase: bool = False) -> PreTrainedTokenizerFast:
    """Writes a tokenizer of single characters; decoding returns exactly the encoded text.

    Args:
        folder: for its files.
        characters: the vocabulary, without duplicates; other characters become `<unk>`.
        lowercase: lower-cases text before it is encoded.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocabulary = {token: at for at, token in enumerate((*SPECIAL, *dict.fromkeys(characters)))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    if lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    return _save(tokenizer, folder)


def write_byte_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Writes a tokenizer of single bytes: any text, 256 tokens and three special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: at for at, token in enumerate((*SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _save(tokenizer, folder)


def _save(tokenizer: Tokenizer, folder: Path) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    folder.mkdir(parents=True, exist_ok=True)
    fast.save_pretrained(folder)
    return fast
