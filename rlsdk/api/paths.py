"""Paths of a configuration, made absolute when a run is made: so that it can be evaluated and resumed from anywhere."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlsdk.config import RunConfig

FOLDERS = (("model", "path"), ("model", "tokenizer"), ("ref", "path"), ("critic", "path"))
"""Fields that name a folder or something of the hub."""
FUNCTIONS = (("algorithm", "advantage"), ("algorithm", "loss"), ("algorithm", "loss_aggregation"),
             ("algorithm", "kl_estimator"), ("algorithm", "kl_reward_estimator"),
             ("rollout", "rollouter"))  # fmt: skip
"""Fields that may name `file.py:fn`."""
OF_FILES = frozenset({"json", "jsonl", "csv", "parquet", "folder"})
"""Data sources whose names end in a path."""


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """The same run, whatever folder a command that reads its configuration is started in.

    Names that are no local file or folder stay as they are: those of the hub, of registered sources, of modules.
    """
    fields: dict[str, Any] = config.model_dump()
    for section, name in FOLDERS:
        _change(fields[section], name, absolute_folder)
    for section, name in FUNCTIONS:
        _change(fields[section], name, absolute_function)
    for name in ("train", "eval"):
        _change(fields["data"], name, absolute_source)
    for part in fields["data"]["mixture"]:
        _change(part, "source", absolute_source)
    for reward in fields["rewards"]:
        _change(reward, "name", absolute_function)
    for model in fields["reward_models"]:
        _change(model, "path", absolute_folder)
    fields["trainer"]["callbacks"] = tuple(map(absolute_function, fields["trainer"]["callbacks"]))
    if fields["trainer"]["resume"] not in ("auto", "never"):
        _change(fields["trainer"], "resume", absolute_folder)
    return RunConfig.model_validate(fields)


def absolute_folder(name: str) -> str:
    """The folder's absolute path where there is one of that name."""
    path = Path(name).expanduser()
    return os.path.abspath(path) if _is_there(path) else name


def absolute_function(name: str) -> str:
    """`file.py:fn` with the absolute path of the file, there or not; anything else as it is."""
    where, colon, function = name.rpartition(":")
    return f"{os.path.abspath(Path(where).expanduser())}:{function}" if colon and where.endswith(".py") else name


def absolute_source(name: str) -> str:
    """A data source with its path made absolute, where it has one: a file, a folder, `FOLDER:SPLIT`, `json:FILE`."""
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
    path = Path(name).expanduser() if name else None
    return os.path.abspath(path) if path is not None and _is_there(path) else None


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _change(fields: Any, name: str, change: Any) -> None:
    if isinstance(fields, Mapping) and fields.get(name) is not None:
        fields[name] = change(fields[name])  # type: ignore[index]  # a section of `model_dump`
