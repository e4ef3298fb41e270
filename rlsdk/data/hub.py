"""Loads rows with Hugging Face `datasets`: folders saved by it, folders of data files, and data sets of the hub."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlsdk.data.files import SUFFIXES, check_columns, local_path
from rlsdk.data.rows import DataRow, to_row
from rlsdk.interfaces import DataError, nearest

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

ON_THE_HUB = "Check the name and the network, or download it and give the folder"
OF_A_FOLDER = "Name one of its files in place of the folder to see which one is wrong"


def load_folder(
    rest: str, *, split: str | None = None, columns: Sequence[str] | None = None, cache_dir: str | None = None
) -> Iterator[DataRow]:
    """Rows of a folder: one written by `save_to_disk`, or one of data files that `load_dataset` understands.

    Args:
        rest: path of the folder, with an optional `:split` at its end.
        split: the same, as an option.
        columns: names of those to read; all by default.
        cache_dir: where `datasets` keeps what it prepares from data files.
    """
    path, split = _folder_and_split(rest, split)
    if any((path / marker).is_file() for marker in ("dataset_dict.json", "state.json")):
        return _rows(_load_saved(path), str(path), split, columns)
    check_folder(rest)
    return _rows(_load_dataset(str(path), None, None, cache_dir), str(path), split, columns)


def check_folder(rest: str) -> None:
    """Looks whether a folder holds any file.

    Raises:
        DataError: it holds none; or there is no such folder.
    """
    path, _ = _folder_and_split(rest, None)
    for _, folders, files in os.walk(path, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if any(not name.startswith(".") for name in files):
            return
    raise DataError(
        f"{path}: this folder holds no file; expected one saved by `datasets`, or one of data files "
        f"({', '.join(SUFFIXES)})"
    )


def load_hub(
    rest: str,
    *,
    config: str | None = None,
    split: str | None = None,
    revision: str | None = None,
    columns: Sequence[str] | None = None,
    cache_dir: str | None = None,
) -> Iterator[DataRow]:
    """Rows of a data set of the hub. Code in the data set is never run.

    Args:
        rest: `org/name`, `org/name:split`, `org/name:config` or `org/name:config:split`.
        config: the configuration, as an option.
        split: the split, as an option.
        revision: branch, tag or commit.
        columns: names of those to read; all by default.
        cache_dir: where `datasets` keeps what it downloads.
    """
    name, *parts = rest.split(":")
    if len(parts) > 2 or "" in (name, *parts):
        raise DataError(f"hf:{rest}: expected hf:org/name, followed by :split, :config or :config:split")
    if len(parts) == 2:
        config, split = parts
    elif parts:
        # Only the data set knows whether a single part is a configuration or a split.
        known = _config_names(name, revision)
        config, split = (parts[0], split) if parts[0] in known else (config, parts[0])
    return _rows(_load_dataset(name, config, revision, cache_dir), f"hf:{name}", split, columns)


def _folder_and_split(rest: str, split: str | None) -> tuple[Path, str | None]:
    path = local_path(rest)
    if path.is_dir():
        return path, split
    front, colon, last = rest.rpartition(":")
    if colon and local_path(front).is_dir():
        return local_path(front), last
    raise DataError(f"{rest}: no such folder; expected one saved by `datasets`, or one of data files")


def _load_saved(path: Path) -> Dataset | DatasetDict:
    import datasets

    try:
        return datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: `datasets` cannot read this folder: {error}") from error


def _load_dataset(name: str, config: str | None, revision: str | None, cache_dir: str | None) -> Dataset | DatasetDict:
    import datasets

    try:
        return datasets.load_dataset(name, config, revision=revision, cache_dir=cache_dir)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        called, hint = (name, OF_A_FOLDER) if os.path.isdir(name) else (f"hf:{name}", ON_THE_HUB)
        raise DataError(f"{called}: `datasets` cannot load it: {type(error).__name__}: {error}. {hint}") from error


def _config_names(name: str, revision: str | None) -> Sequence[str]:
    import datasets

    try:
        return list(datasets.get_dataset_config_names(name, revision=revision))
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"hf:{name}: `datasets` cannot find it: {type(error).__name__}: {error}") from error


def _rows(
    data: Dataset | DatasetDict, name: str, split: str | None, columns: Sequence[str] | None
) -> Iterator[DataRow]:
    table = _chosen_split(data, name, split)
    check_columns(columns, table.column_names, name)
    if columns:
        table = table.select_columns(list(columns))
    number = 0
    try:
        for number, row in enumerate(table, 1):
            yield to_row(row, f"{name}:{number}")
    except DataError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        # These include Arrow's errors: files that were damaged after `datasets` wrote them.
        raise DataError(f"{name}:{number + 1}: `datasets` cannot read this row: {error}") from error


def _chosen_split(data: Dataset | DatasetDict, name: str, split: str | None) -> Dataset:
    import datasets

    if isinstance(data, datasets.Dataset):
        if split is not None and split != str(data.split):
            raise DataError(f"{name}: has no splits, but split {split!r} was asked for; leave the split out")
        return data
    splits = sorted(data)
    if split is None and len(splits) == 1:
        split = splits[0]
    if split is None:
        raise DataError(f"{name}: has several splits {splits}; name one, for example `{name}:{splits[-1]}`")
    if split not in data:
        raise DataError(f"{name}: no split {split!r}{nearest(split, splits)}; it has {splits}")
    return data[split]
