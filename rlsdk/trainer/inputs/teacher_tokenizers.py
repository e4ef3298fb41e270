"""Compares the tokenizers of teachers with the policy's: a teacher gets token ids, so each must mean the same bytes.
Imports no torch: files are compared before that import."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlsdk.config import Problem, RunConfig, TeacherConfig
from rlsdk.interfaces import ConfigError
from rlsdk.trainer.inputs.log_prob_files import LogProbFile

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""A byte as a token, in tokenizers with byte fallback."""
_SPACE = "▁"
"""The space of tokenizers in the form of SentencePiece."""


def check_tokenizer(config: RunConfig, teacher: TeacherConfig, field: str, tokenizer: Any) -> None:
    """Compares a teacher's tokenizer with the policy's, token by token, special tokens too.

    Raises:
        ConfigError: there is none, or an id of the policy's means other bytes in it, or nothing; names the first.
    """
    from rlsdk.kit.model.hf import load_tokenizer

    name, named = _named(teacher, field)
    try:
        own = load_tokenizer(name, revision=teacher.revision, trust_remote_code=config.model.trust_remote_code)
    except ConfigError as error:
        raise ConfigError(
            f"{named} {name!r}: has no tokenizer that could be compared with the policy's: the same ids must mean the "
            f"same bytes to a teacher. Copy its tokenizer's files there, or name it in {field}.tokenizer ({error})"
        ) from error
    check_meanings(config, tokenizer, token_bytes(own), f"{named} {name!r}")


def check_meanings(config: RunConfig, tokenizer: Any, theirs: Mapping[int, bytes], named: str) -> None:
    """Compares the policy's tokenizer with what the ids mean to a teacher, `named` so in the message.

    Raises:
        ConfigError: an id of the policy's means other bytes there, or nothing; names the first.
    """
    own = token_bytes(tokenizer)
    token = next((token for token, meant in sorted(own.items()) if theirs.get(token) != meant), None)
    if token is not None:
        raise ConfigError(f"{named}: {_difference(config, token, own[token], theirs.get(token))}")


def tokenizer_problems(config: RunConfig) -> Iterator[Problem]:
    """Ids that mean other bytes to a teacher, as far as files in folders tell: an id that one of them lacks may come
    from elsewhere, so that only `check_tokenizer` refuses it."""
    own = _bytes_of_file(config.model.tokenizer or config.model.path or "")
    for at, teacher in enumerate(config.teachers if own and not config.model.trust_remote_code else ()):
        if teacher.is_policy or teacher.align == "text":
            continue
        named, field = _named(teacher, f"teachers.{at}")
        if teacher.log_probs is None:
            theirs = _bytes_of_file(named)
        else:
            named, field = teacher.log_probs, f"teachers.{at}.log_probs"
            theirs = LogProbFile(named).meanings()
        token = next((one for one in sorted(own.keys() & theirs.keys()) if own[one] != theirs[one]), None)
        if token is not None:
            yield Problem(field, f"{named!r}: {_difference(config, token, own[token], theirs[token])}")


def _named(teacher: TeacherConfig, field: str) -> tuple[str, str]:
    """A teacher's tokenizer, and the field that names it."""
    named = f"{field}.{'path' if teacher.tokenizer is None else 'tokenizer'}"
    return teacher.tokenizer or teacher.path or "", named


def _difference(config: RunConfig, token: int, meant: bytes, theirs: bytes | None) -> str:
    there = "is unknown to it" if theirs is None else f"is {_shown(theirs)} there"
    return (
        f"its tokenizer is not the policy's, {config.model.tokenizer or config.model.path!r}: token {token} is "
        f"{_shown(meant)} here and {there}. A teacher gets the policy's token ids, so each must mean the same bytes to "
        "it: choose a teacher of the policy's family"
    )


def _bytes_of_file(folder: str) -> Mapping[int, bytes]:
    """As `token_bytes`, of the `tokenizer.json` in a folder; empty where there is none, or it cannot be read."""
    from tokenizers import Tokenizer

    file = Path(folder) / "tokenizer.json"
    try:
        if not folder or not file.is_file():
            return {}
        tokenizer = Tokenizer.from_file(str(file))
    except Exception:  # of its own kind; what is wrong with a model's files is said where they are loaded
        return {}
    added = {int(token): str(one.content) for token, one in tokenizer.get_added_tokens_decoder().items()}
    return _meanings(tokenizer.get_vocab(), added, _decoder_kinds(tokenizer))


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
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return _meanings(tokenizer.get_vocab(), added, set() if backend is None else _decoder_kinds(backend))


def _meanings(vocabulary: Mapping[str, int], added: Mapping[int, str], decoders: set[str]) -> dict[int, bytes]:
    """Bytes of each id of a vocabulary with some added tokens, decoded in steps of these kinds."""
    byte_level = _byte_of_character() if "ByteLevel" in decoders else {}
    meant = {}
    for text, token in vocabulary.items():
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
    """Kinds of the steps of a decoder."""
    decoder = json.loads(tokenizer.to_str()).get("decoder")
    steps = [] if decoder is None else decoder.get("decoders", [decoder])
    return {str(step.get("type")) for step in steps}


def _byte_of_character() -> Mapping[str, int]:
    """The character by which byte-level vocabularies write each byte: printable ones of Latin-1 as themselves, the
    others, in order, by the characters from 256 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(others)}
