"""Compares the tokenizers of teachers with the policy's: a teacher gets token ids, so each must mean the same bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from rlsdk.config import RunConfig, TeacherConfig
from rlsdk.interfaces import ConfigError
from rlsdk.kit.model.hf import load_tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""A byte as a token, in tokenizers with byte fallback."""
_SPACE = "▁"
"""The space of tokenizers in the form of SentencePiece."""


def check_tokenizer(config: RunConfig, teacher: TeacherConfig, field: str, tokenizer: Any) -> None:
    """Compares a teacher's tokenizer with the policy's, token by token, special tokens too.

    Raises:
        ConfigError: there is none, or an id of the policy's means other bytes in it, or nothing; names the first.
    """
    name, named = (
        teacher.tokenizer or teacher.path or "",
        f"{field}.{'path' if teacher.tokenizer is None else 'tokenizer'}",
    )
    try:
        own = load_tokenizer(name, revision=teacher.revision, trust_remote_code=config.model.trust_remote_code)
    except ConfigError as error:
        raise ConfigError(
            f"{named} {name!r}: has no tokenizer that could be compared with the policy's: the same ids must mean the "
            f"same bytes to a teacher. Copy its tokenizer's files there, or name it in {field}.tokenizer ({error})"
        ) from error
    theirs = token_bytes(own)
    for token, meant in sorted(token_bytes(tokenizer).items()):
        if theirs.get(token) == meant:
            continue
        there = "is unknown to it" if token not in theirs else f"is {_shown(theirs[token])} there"
        raise ConfigError(
            f"{named} {name!r}: its tokenizer is not the policy's, {config.model.tokenizer or config.model.path!r}: "
            f"token {token} is {_shown(meant)} here and {there}. A teacher gets the policy's token ids, so each must "
            "mean the same bytes to it: choose a teacher of the policy's family"
        )


def _shown(meant: bytes) -> str:
    try:
        return repr(meant.decode())
    except UnicodeDecodeError:
        return repr(meant)


def token_bytes(tokenizer: Any) -> Mapping[int, bytes]:
    """Bytes that each id of a tokenizer stands for, added and special tokens included.

    Tokens of byte-level vocabularies and of byte fallback are turned into their bytes, and the mark of SentencePiece
    into a space, so that vocabularies of different kinds can be compared.
    """
    added = {int(token): str(text) for text, token in tokenizer.get_added_vocab().items()}
    parts = _decoder_kinds(tokenizer)
    byte_level = _byte_of_character() if "ByteLevel" in parts else {}
    meant = {}
    for text, token in tokenizer.get_vocab().items():
        if token in added:
            meant[int(token)] = added[token].encode()
        elif byte_level and all(character in byte_level for character in text):
            meant[int(token)] = bytes(byte_level[character] for character in text)
        elif match := _BYTE.fullmatch(text):
            meant[int(token)] = bytes([int(match[1], 16)])
        else:
            meant[int(token)] = text.replace(_SPACE, " ").encode("utf-8", "surrogatepass")
    return meant


def _decoder_kinds(tokenizer: Any) -> set[str]:
    """Kinds of the steps of a fast tokenizer's decoder; empty for a slow one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = None if backend is None else json.loads(backend.to_str()).get("decoder")
    steps = [] if decoder is None else decoder.get("decoders", [decoder])
    return {str(step.get("type")) for step in steps}


def _byte_of_character() -> Mapping[str, int]:
    """The character by which byte-level vocabularies write each byte: printable ones of Latin-1 as themselves, the
    others, in order, by the characters from 256 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(others)}
