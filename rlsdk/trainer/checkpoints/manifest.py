"""The manifest that seals a checkpoint: every file with size and checksum, and the trainer's own state.

Its first line is the checksum of the rest, so that damage to the manifest is also detected. Checksums are XXH3-128
(https://xxhash.com): they detect damage, not forgery, and are computed faster than disks read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import xxhash
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from rlsdk.interfaces import CheckpointError
from rlsdk.system.files import UnfitFileError, open_regular, read_regular

MANIFEST = "manifest.json"
FORMAT = 2
MAX_MANIFEST_BYTES = 64 << 20
"""Largest manifest in bytes; a larger one was not written by rlsdk and is not read."""
CHUNK_BYTES = 4 << 20
HASH_THREADS = 4
"""Files hashed at once; XXH3 releases the GIL, and disks answer several readers faster than one."""


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name or str(path) != name or name == ".":
        raise ValueError("expected a path inside the checkpoint")
    return name


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class FileSeal(_Strict):
    """Expected size and checksum of a file."""

    size: int = Field(ge=0, lt=2**63)
    """Bytes."""
    xxh3: str = Field(pattern=r"^[0-9a-f]{32}$")
    """XXH3-128 of the content."""


class Manifest(_Strict):
    """Content of `manifest.json`, without the checksum in its first line."""

    format: Literal[2]
    step: int = Field(ge=0, lt=2**53)
    order: int = Field(ge=0, lt=2**53)
    """Number of checkpoints written into the folder so far: the newest has the highest, whatever its step."""
    files: dict[Annotated[str, AfterValidator(_inside)], FileSeal]
    """Files by path relative to the checkpoint."""
    state: dict[str, Any]


def seal(draft: Path, *, step: int, order: int, state: Mapping[str, Any]) -> None:
    """Syncs every file of `draft` to the disk, and writes the manifest that lists them."""
    paths = sorted(path for path in draft.rglob("*") if path.is_file())
    with ThreadPoolExecutor(HASH_THREADS, thread_name_prefix="rlsdk-seal") as pool:
        seals = list(pool.map(_sync_and_hash, paths))
    files = {path.relative_to(draft).as_posix(): sealed.model_dump() for path, sealed in zip(paths, seals, strict=True)}
    content = {"format": FORMAT, "step": step, "order": order, "files": files, "state": dict(state)}
    with (draft / MANIFEST).open("wb") as handle:
        handle.write(_with_checksum(json.dumps(content, indent=1).encode()))
        handle.flush()
        os.fsync(handle.fileno())
    for folder in {draft, *(path for path in draft.rglob("*") if path.is_dir())}:
        sync_folder(folder)


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint folder, checked against its own checksum and schema.

    Raises:
        CheckpointError: missing, unreadable, of another format, or changed after it was written; names what is wrong.
    """
    file = path / MANIFEST
    try:
        raw = read_regular(file, MAX_MANIFEST_BYTES)
        content = json.loads(raw)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise CheckpointError(f"no {MANIFEST}") from error
    except UnfitFileError as error:
        raise CheckpointError(f"{MANIFEST} {error.strerror}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"no readable {MANIFEST} ({type(error).__name__})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{MANIFEST} holds a {type(content).__name__}, expected an object")
    if (version := content.get("format")) != FORMAT:
        raise CheckpointError(f"{MANIFEST} has format {str(version)[:40]!r}; this rlsdk reads format {FORMAT}")
    content.pop("checksum", None)
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))[:100]
        raise CheckpointError(f"{MANIFEST}: {place}: {first['msg']}") from None
    except RecursionError as error:
        raise CheckpointError(f"no readable {MANIFEST} ({type(error).__name__})") from error
    if not has_checksum(raw):
        raise CheckpointError(f"{MANIFEST} was changed after it was written: its checksum differs")
    return manifest


def wrong_sizes(path: Path, manifest: Manifest) -> list[str]:
    """Files that are missing or have another size; reads none of them."""
    problems = []
    for name, sealed in manifest.files.items():
        try:
            size = (path / name).stat().st_size if (path / name).is_file() else None
        except OSError as error:
            problems.append(f"{name} cannot be read ({error.strerror})")
            continue
        if size is None:
            problems.append(f"{name} is missing")
        elif size != sealed.size:
            problems.append(f"{name} has {size} bytes, expected {sealed.size}")
    return problems


def wrong_contents(path: Path, manifest: Manifest, part: str | None = None) -> list[str]:
    """Files whose checksum differs; reads all, or those under the folder `part`."""
    names = [name for name in manifest.files if part is None or PurePosixPath(name).is_relative_to(part)]
    with ThreadPoolExecutor(HASH_THREADS, thread_name_prefix="rlsdk-verify") as pool:
        problems = list(pool.map(lambda name: _content_problem(path / name, name, manifest.files[name]), names))
    return [problem for problem in problems if problem is not None]


def sync_folder(folder: Path) -> None:
    """Syncs a folder's directory entries to the disk; blocks."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _content_problem(file: Path, name: str, sealed: FileSeal) -> str | None:
    try:
        digest = _hash(file)
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None if digest == sealed.xxh3 else f"{name} is damaged: its checksum differs"


def _sync_and_hash(file: Path) -> FileSeal:
    with file.open("rb") as handle:
        os.fsync(handle.fileno())
    return FileSeal(size=file.stat().st_size, xxh3=_hash(file))


def _hash(file: Path) -> str:
    digest = xxhash.xxh3_128()
    for chunk in _chunks(file):
        digest.update(chunk)
    return digest.hexdigest()


def _chunks(file: Path) -> Iterator[memoryview]:
    """Yields the content in chunks, in one buffer that is reused."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with open_regular(file) as handle:
        while count := handle.readinto(buffer):
            yield buffer[:count]


def _with_checksum(body: bytes) -> bytes:
    """`body` is a JSON object; the checksum becomes its first member, on its own line."""
    rest = body[1:].removeprefix(b"\n")
    return b'{"checksum": "' + xxhash.xxh3_128_hexdigest(rest).encode() + b'",\n' + rest


def sealed_text(text: str) -> bytes:
    """An object in JSON, with the checksum of its rest at its beginning."""
    return _with_checksum(text.encode())


def has_checksum(raw: bytes) -> bool:
    """Whether an object in JSON begins with the checksum of its rest."""
    return raw == _with_checksum(_without_checksum(raw))


def _without_checksum(raw: bytes) -> bytes:
    return b"{" + raw.partition(b"\n")[2]
