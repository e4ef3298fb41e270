"""Generated rows: the tasks of reasoning-gym."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from rlsdk.interfaces import ConfigError, nearest
from rlsdk_reasoning_gym.library import import_reasoning_gym, may_have_task


def check_spelling(task: str) -> None:
    """Finds nearly all misspelt tasks without importing reasoning-gym.

    Raises:
        ConfigError: no such task, with the nearest name.
    """
    if not may_have_task(task):
        _check_task(task, import_reasoning_gym().DATASETS)


def _check_task(task: str, tasks: Collection[str]) -> None:
    if task not in tasks:
        have = f"; the installed reasoning-gym has {len(tasks)}: {', '.join(sorted(tasks))}"
        raise ConfigError(f"reasoning_gym:{task}: no such task{nearest(task, tasks) or have}")


def load_reasoning_gym(
    rest: str, *, limit: int | None = None, size: int | None = None, seed: int = 0, **parameters: Any
) -> Iterator[Mapping[str, Any]]:
    """Rows `{question, answer, metadata}` of a reasoning-gym task, the same for the same seed and parameters.

    A row is the task's own item, so `score_answer(text, row)` of the task grades it; `metadata.source_dataset` names
    the task.

    Args:
        rest: name of the task, for example `chain_sum`.
        limit: number of rows if `size` is not given.
        size: number of rows; the task's default if neither is given.
        seed: of the generator.
        parameters: the task's own, for example `min_digits`.

    Raises:
        ConfigError: no such task, no such parameter (with the nearest name), or a value that the task refuses.
    """
    library = import_reasoning_gym()
    tasks = library.DATASETS
    _check_task(rest, tasks)
    fields = sorted(f.name for f in dataclasses.fields(tasks[rest][1]))
    for name in parameters:
        if name not in fields:
            raise ConfigError(f"reasoning_gym:{rest}: no parameter {name!r}{nearest(name, fields)}; it has {fields}")
    size = limit if size is None else size
    chosen = {**parameters, "seed": seed, **({} if size is None else {"size": size})}
    try:
        items = library.create_dataset(rest, **chosen)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"reasoning_gym:{rest} refuses {chosen}: {error}") from error
    return (items[at] for at in range(len(items)))


load_reasoning_gym.check = check_spelling  # type: ignore[attr-defined]  # as `DataSource` has it
