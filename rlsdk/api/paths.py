"""Makes the paths of a configuration absolute, so that a run can be evaluated and resumed from any folder."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlsdk.config import RunConfig
from rlsdk.config.sections.base import FIELDS_ONLY

FUNCTION = re.compile(r"[^\n{}]*\.py:\w+")
"""Pattern of `file.py:fn`, in any field."""
FOLDERS = frozenset({"path", "tokenizer", "log_probs"})
"""Names of fields that hold a folder or a name on the hub, or a file."""
SOURCES = frozenset(
    {"data.train", "data.eval", "data.mixture.*.source", "algorithm.ptx.source", "teachers.*.sources.*"}
)
"""Fields that hold a data source; `*` is a key or a position."""
OF_OTHERS = frozenset({"options", "engine_kwargs", "rollouter_options", "environment_options",
                       "agent_options", "eval_options", "source_options", "chat_template_kwargs"})  # fmt: skip
"""Names of fields whose content is defined by a component or an engine."""
OF_FILES = frozenset({"json", "jsonl", "csv", "parquet", "folder"})
"""Data sources whose names end in a path."""


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """A copy with absolute paths, which is the same run from any working directory.

    Names that are not local files or folders are unchanged: those of the hub, of registered sources, of modules.
    """
    fields: dict[str, Any] = config.model_dump()
    changed = _changed(fields, "")
    resume = fields["trainer"]["resume"]
    if resume not in ("auto", "never"):
        changed["trainer"]["resume"] = absolute_folder(resume)
    return config if changed == fields else RunConfig.model_validate(changed, context=FIELDS_ONLY)


def _changed(value: Any, place: str) -> Any:
    name = place.rpartition(".")[2]
    if name in OF_OTHERS:
        return value
    if isinstance(value, dict):
        return {key: _changed(item, f"{place}.{key}" if place else key) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_changed(item, f"{place}.*") for item in value)
    if not isinstance(value, str):
        return value
    if place in SOURCES or (place.startswith("eval.sets.") and name == "data"):
        return absolute_source(value)
    return absolute_folder(value) if name in FOLDERS else absolute_function(value)


def absolute_folder(name: str) -> str:
    """The folder's absolute path if it exists."""
    return _absolute(name) or name


def absolute_function(name: str) -> str:
    """`file.py:fn` with the absolute path of the file, whether it exists or not; anything else unchanged."""
    if not FUNCTION.fullmatch(name):
        return name
    where, _, function = name.rpartition(":")
    return f"{os.path.abspath(Path(where).expanduser())}:{function}"


def absolute_source(name: str) -> str:
    """A data source with an absolute path if it has one: a file, a folder, `FOLDER:SPLIT`, `json:FILE`."""
    return next((found for found in _readings(name) if found is not None), name)


def _readings(name: str) -> Iterator[str | None]:
    yield _absolute(name)
    kind, colon, rest = name.partition(":")
    if colon and kind in OF_FILES and (path := _absolute(rest) or _with_split(rest)):
        yield f"{kind}:{path}"
    yield _with_split(name)


def _with_split(name: str) -> str | None:
    folder, colon, split = name.rpartition(":")
    found = _absolute(folder) if colon and folder else None
    return f"{found}:{split}" if found is not None and os.path.isdir(found) else None


def _absolute(name: str) -> str | None:
    try:
        path = Path(name).expanduser()
        return os.path.abspath(path) if name and path.exists() else None
    except (OSError, ValueError, RuntimeError):
        return None
