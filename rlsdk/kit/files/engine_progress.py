"""What a sharded engine's checkpoint holds besides tensors: a small JSON file, which rank 0 writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rlsdk.interfaces import CheckpointError
from rlsdk.kit.files.atomic_files import atomic_write_json

STATE = "engine.json"
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Content that all engines have; an engine adds its own fields."""

    num_steps: int
    """Steps of the schedule."""
    world_size: int
    """Number of ranks that saved it, each with a random state."""
    base: str | None = None
    """Fingerprint of the frozen weights below an adapter."""
    has_reference: bool = False
    """Whether it has the adapter of the reference."""


T = TypeVar("T")


def write_progress(folder: Path, progress: Progress) -> None:
    """Writes the JSON file."""
    atomic_write_json(folder / STATE, {"format": FORMAT, **vars(progress)})


def read_progress(folder: Path, backend: str, own: Callable[[Mapping[str, Any], Mapping[str, Any]], T]) -> T:
    """Reads the JSON file.

    Args:
        folder: the checkpoint.
        backend: name of the backend that reads.
        own: makes the result from the file's content, and from the fields of `Progress` in it.

    Raises:
        CheckpointError: the file is missing or damaged, or of another format.
    """
    try:
        found = json.loads((folder / STATE).read_text())
        if found["format"] != FORMAT:
            raise ValueError(f"{STATE} has format {found['format']!r}, expected {FORMAT}")
        common = {
            "num_steps": int(found["num_steps"]),
            "world_size": int(found["world_size"]),
            "base": found.get("base"),
            "has_reference": bool(found.get("has_reference", False)),
        }
        return own(found, common)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{folder} is not a complete checkpoint of backend {backend!r}: {type(error).__name__}: {error}"
        ) from error
