"""Digests of the content of files: of code with what it imports from beside it, of models by index and headers."""

from __future__ import annotations

import ast
import json
import marshal
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import xxhash

DIGEST = "xxh3:"
"""Begins every digest."""
MISSING = "missing"
"""Stands for the digest of a file that cannot be read."""
WHOLE_BYTES = 16 << 20
"""Largest file in bytes of which every byte counts; of larger ones the size, the header and pages do."""
PAGE_BYTES, PAGE_EVERY, MAX_PAGES = 4096, 4 << 20, 2048
"""Size of a page, distance between those that are spread over a file, and their largest number."""
MAX_TENSORS = 10_000
"""Most tensors of a file of which the first, the middle and the last page count."""
MAX_FILES = 200
"""Most files of code that are followed from one file."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
DESCRIBED = (".json", ".jinja", ".txt", ".model", ".py")
"""Files of a model's folder besides the weights: configuration, index, tokenizer, chat template, its own code."""


def digest_of(data: bytes) -> str:
    return DIGEST + xxhash.xxh3_64_hexdigest(data)


def file_digest(path: Path) -> str:
    """Digest of a file: of all bytes, or of the size, the header and pages of a large one."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size <= WHOLE_BYTES:
                return digest_of(file.read())
            hashed = xxhash.xxh3_64(str(size).encode())
            # A safetensors file begins with the length of its header: names, dtypes, shapes and places of the tensors.
            header = file.read(min(int.from_bytes(file.read(8), "little"), WHOLE_BYTES))
            hashed.update(header)
            for place in sorted({*_even_pages(size), *_tensor_pages(header, size)}):
                hashed.update(os.pread(file.fileno(), PAGE_BYTES, place))
            return DIGEST + hashed.hexdigest()
    except OSError:
        return MISSING


def _even_pages(size: int) -> Iterator[int]:
    """Places of pages over a whole file, the first and the last one included."""
    count = min(MAX_PAGES, size // PAGE_EVERY + 2)
    return ((size - PAGE_BYTES) * at // (count - 1) for at in range(count))


def _tensor_pages(header: bytes, size: int) -> Iterator[int]:
    """Places of the first, the middle and the last page of each tensor of a safetensors file of `size` bytes, so that
    one that was replaced, or got other rows at its end, is noticed; none for another file."""
    try:
        fields = json.loads(header)
        spans = [entry["data_offsets"] for name, entry in fields.items() if name != "__metadata__"]
        begin = 8 + len(header)
        for first, last in spans[:MAX_TENSORS]:
            end = max(first, last - PAGE_BYTES)
            yield from (min(size, begin + max(0, int(place))) for place in (first, (first + end) // 2, end))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return


def code_digests(file: Path, root: Path | None = None) -> dict[str, str]:
    """Digests of a Python file and of the modules in `root` that it imports, and those import, by path relative to it.

    `root`: the folder from which they are imported; None: that of the file.
    """
    root = root or file.parent
    digests: dict[str, str] = {}
    waiting = [file]
    while waiting and len(digests) < MAX_FILES:
        path = waiting.pop()
        name = path.relative_to(root).as_posix()
        if name not in digests:
            digests[name] = file_digest(path)
            waiting += _imported(path, root)
    return digests


def path_digests(path: Path) -> dict[str, str]:
    """Digest of a file, or of all files of a folder with at most `MAX_FILES`, by name; empty for anything else."""
    if path.is_file():
        return {path.name: file_digest(path)}
    if not path.is_dir():
        return {}
    inside = list(islice((each for each in path.rglob("*") if each.is_file()), MAX_FILES + 1))
    if len(inside) > MAX_FILES:
        return {}
    return {path.name: joined({each.relative_to(path).as_posix(): file_digest(each) for each in inside})}


def _imported(file: Path, root: Path) -> Iterator[Path]:
    """Files below `root` that a Python file imports."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _modules(root, alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            base = root if node.level == 0 else file.parents[min(node.level, len(file.parents)) - 1]
            parts = node.module.split(".") if node.module else []
            if base.is_relative_to(root):
                for alias in node.names:
                    yield from _modules(base, [*parts, alias.name])


def _modules(base: Path, parts: list[str]) -> Iterator[Path]:
    """Files of a module and of the packages that it is in."""
    for count in range(1, len(parts) + 1):
        place = base.joinpath(*parts[:count])
        for path in (place.with_name(f"{place.name}.py"), place / "__init__.py"):
            if path.is_file():
                yield path


def model_digests(folder: Path) -> dict[str, str]:
    """Digests of a model's folder, by name of the file; all weight files are one, `weights`. Reads little of them."""
    try:
        files = sorted(path for path in folder.iterdir() if path.is_file())
    except OSError:
        return {"folder": MISSING}
    described = {path.name: file_digest(path) for path in files if path.suffix in DESCRIBED}
    weights = [f"{path.name} {file_digest(path)}" for path in files if path.suffix in WEIGHTS]
    return described | ({"weights": digest_of("\n".join(weights).encode())} if weights else {})


def joined(found: Mapping[str, str]) -> str:
    """One digest of several."""
    return digest_of("\n".join(f"{name} {digest}" for name, digest in sorted(found.items())).encode())


def rows_digest(rows: Iterable[Any]) -> str:
    """Digest of values of JSON types, in order."""
    hashed = xxhash.xxh3_64()
    for row in rows:
        try:
            hashed.update(marshal.dumps(row, 2))  # version 2 has no references to objects: equal values, equal bytes
        except ValueError:  # of a type that only behaves like one of JSON
            hashed.update(json.dumps(row, default=str).encode())
    return DIGEST + hashed.hexdigest()
