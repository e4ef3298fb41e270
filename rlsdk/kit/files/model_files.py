"""Whether the files of a model's folder are whole, by names, sizes and headers. Reads no tensor, loads no torch."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rlsdk.interfaces.spelling import Setting
from rlsdk.system.files import foreign_reason, read_regular

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
MAX_HEADER_BYTES = 100_000_000
"""As safetensors itself allows."""
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_OF_TOKENIZER = re.compile(r"tokenizer|vocab|merges|bpe|tiktoken|tekken|\.model$|\.spm$")
_POINTER = b"version https://git-lfs"
_AGAIN = "copy or download it again"


def weights_fault(folder: Path) -> str:
    """What is wrong with the safetensors of a model's folder, and what to do; empty where they are whole."""
    try:
        if (folder / INDEX).is_file():
            return _index_fault(folder)
        if (folder / WEIGHTS).is_file():
            fault, _ = _header(folder / WEIGHTS)
            return fault and f"{WEIGHTS} {fault}"
        others = sorted(entry.name for entry in folder.iterdir() if entry.suffix in (".safetensors", ".bin", ".gguf"))
    except OSError as error:
        return _unreadable(error, folder)
    have = f"; it has {', '.join(others[:3])}" if others else ""
    return (
        f"holds neither {WEIGHTS} nor {INDEX}{have}. Save the model with save_pretrained, or start from random "
        f"weights: {Setting('model.init_from_config', True)}"
    )


def tokenizer_fault(folder: Path) -> str:
    """What is wrong with the tokenizer of a folder, and what to do; empty where it has files of one."""
    try:
        names = [entry.name for entry in folder.iterdir() if not entry.is_dir()]
        for name in sorted(filter(_OF_TOKENIZER.search, names)):
            if reason := foreign_reason(folder, folder / name):
                return (
                    f"{name} {reason}. Files of the tokenizer are copied into every export: put the file itself there"
                )
        if not any(map(_OF_TOKENIZER.search, names)):
            return (
                "holds no tokenizer (tokenizer.json, tokenizer.model or vocab.json). Copy these files from the model "
                f"that it was made from, or name that one's folder: {Setting('model.tokenizer', 'FOLDER')}"
            )
        file = folder / "tokenizer.json"
        return _json_fault(file) if file.is_file() else ""
    except OSError as error:
        return _unreadable(error, folder)


def has_chat_template(folder: Path) -> bool:
    """Whether the tokenizer of a folder has a chat template, in one of the places where transformers looks for it."""
    return any((folder / name).exists() for name in CHAT_TEMPLATES) or bool(tokenizer_setting(folder, "chat_template"))


def tokenizer_setting(folder: Path, name: str) -> Any:
    """A field of a folder's `tokenizer_config.json`; None: there is none."""
    try:
        return json.loads(read_regular(folder / TOKENIZER_CONFIG)).get(name)
    except (OSError, ValueError, AttributeError):
        return None


def _index_fault(folder: Path) -> str:
    try:
        placed = json.loads(read_regular(folder / INDEX))["weight_map"]
        files: dict[str, set[str]] = {}
        for name, file in placed.items():
            files.setdefault(file, set()).add(name)
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{INDEX} is no index of safetensors: expected an object with weight_map; {_AGAIN}"
    for file, names in sorted(files.items()):
        if not (folder / file).is_file():
            return f"{INDEX} names {file}, which is not there; {_AGAIN}"
        fault, have = _header(folder / file)
        if fault:
            return f"{file} {fault}"
        if lacking := sorted(names.difference(have)):
            return f"{file} lacks {len(lacking)} of the tensors that {INDEX} names, first {lacking[0]!r}; {_AGAIN}"
    return ""


def _header(file: Path) -> tuple[str, Collection[str]]:
    """What is wrong with a safetensors file, and the names of its tensors: eight bytes say how long the JSON header is,
    which says where in the rest each tensor lies."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(len(_POINTER))
        if start == _POINTER:
            return "is a pointer of Git LFS, not the weights themselves: run `git lfs pull` in its folder", ()
        length = int.from_bytes(start[:8], "little")
        if not size:
            return f"is empty; {_AGAIN}", ()
        if size < 8 or not 2 <= length <= MAX_HEADER_BYTES:
            return f"is no safetensors file: it does not begin with the length of a header; {_AGAIN}", ()
        if 8 + length > size:
            return f"is cut short: {size:,} bytes of a header of {8 + length:,}; {_AGAIN}", ()
        stream.seek(8)
        raw = stream.read(length)
    try:
        header = json.loads(raw)
        tensors = {name: place for name, place in header.items() if name != "__metadata__"}
        wrong = next((name for name, place in tensors.items() if not _fits(place)), None)
        end = max((place["data_offsets"][1] for place in tensors.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return f"is no safetensors file: its header cannot be read; {_AGAIN}", ()
    whole = 8 + length + end
    if wrong is not None:
        return f"contradicts itself: bytes and shape of {wrong!r} differ; {_AGAIN}", ()
    if size < whole:
        return f"is cut short: {size:,} of {whole:,} bytes; {_AGAIN}", ()
    if size > whole:
        return f"has {size:,} bytes where its header says {whole:,}; {_AGAIN}", ()
    return "", tensors


def _fits(place: Mapping[str, Any]) -> bool:
    """Whether a tensor has as many bytes as its shape and dtype say."""
    begin, end = place["data_offsets"]
    size = _ITEM_BYTES.get(place["dtype"])
    return bool(0 <= begin <= end) and (size is None or end - begin == size * math.prod(place["shape"]))


def _json_fault(file: Path) -> str:
    """By its two ends only: a tokenizer's file may be large."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(64)
        stream.seek(max(size - 64, 0))
        end = stream.read(64)
    if start.startswith(_POINTER):
        return f"{file.name} is a pointer of Git LFS, not the file itself: run `git lfs pull` in its folder"
    if not size:
        return f"{file.name} is empty; {_AGAIN}"
    if not start.lstrip().startswith(b"{") or not end.rstrip().endswith(b"}"):
        return f"{file.name} is cut short, or no JSON object; {_AGAIN}"
    return ""


def _unreadable(error: OSError, folder: Path) -> str:
    name = os.path.relpath(error.filename, folder) if error.filename else "a file"
    return f"{'the folder' if name == '.' else name} cannot be read: {error.strerror}; check its permissions"
