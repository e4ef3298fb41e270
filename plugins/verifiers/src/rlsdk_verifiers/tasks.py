"""Tasks of a taskset, and the rows that stand for them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import islice
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_taskset, taskset_config_type

from rlsdk.interfaces import ConfigError

TASKSET, TASK = "taskset", "task"
"""Fields of a row: name and options of its taskset, and the number of its task."""
_MOST_TASKS = 1_000_000


def load_rows(rest: str, *, limit: int | None = None, **options: Any) -> Iterator[Mapping[str, Any]]:
    """Rows `{prompt, task, taskset}` of a taskset, in its order.

    Args:
        rest: name of the taskset, an installed package.
        limit: number of rows; an infinite taskset needs it.
        options: fields of the taskset's configuration.

    Raises:
        ConfigError: no such taskset, or an option that it refuses.
    """
    key = {"id": rest, **options}
    taskset = taskset_of(json.dumps(key, sort_keys=True))
    if limit is None and not taskset.bounded:
        raise ConfigError(f"verifiers:{rest} is infinite; say how many rows: --data.num_train_rows, or `limit`")
    for number, task in enumerate(islice(taskset, limit)):
        yield {"prompt": _prompt_text(task), TASK: number, TASKSET: key}


def task_of(row: Mapping[str, Any]) -> vf.Task:
    """The task that a row stands for.

    Raises:
        ConfigError: the row is none of `load_rows`.
    """
    if not isinstance(row.get(TASKSET), Mapping) or not isinstance(row.get(TASK), int):
        raise ConfigError(f"rlsdk_verifiers:play needs rows of --data verifiers:TASKSET; this one has {sorted(row)}")
    tasks = _tasks_of(json.dumps(dict(row[TASKSET]), sort_keys=True))
    return tasks.get(row[TASK])


@cache
def taskset_of(key: str) -> vf.Taskset:
    """A taskset by the JSON of its name and options. Raises ConfigError."""
    fields = json.loads(key)
    try:
        return load_taskset(taskset_config_type(fields["id"]).model_validate(fields))
    except Exception as error:  # of a package of a stranger
        raise ConfigError(f"verifiers:{fields['id']}: {type(error).__name__}: {error}") from error


@cache
def _tasks_of(key: str) -> _Tasks:
    return _Tasks(iter(taskset_of(key)))


class _Tasks:
    """Tasks that were made so far, kept: a taskset makes them in order only."""

    def __init__(self, more: Iterator[vf.Task]) -> None:
        self._made: list[vf.Task] = []
        self._more = more

    def get(self, number: int) -> vf.Task:
        while len(self._made) <= min(number, _MOST_TASKS):
            self._made.append(next(self._more))
        return self._made[number]


def _prompt_text(task: vf.Task) -> str:
    """For people and for the length of prompts: the agent sends the task's own messages."""
    prompt = task.data.prompt
    if isinstance(prompt, str):
        return prompt
    texts = [message.content for message in prompt or () if isinstance(getattr(message, "content", None), str)]
    return "\n".join(texts)
