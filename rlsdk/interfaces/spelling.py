"""How messages spell settings and data: as the user who started the run writes them.

A check does not know who reads its message: somebody at a command line, or the author of a call of `rlsdk.train`. It
names a `Setting` or the row of a file, and these become text when the message is made: `--trainer.steps 200` and
`rows.jsonl:3`, or `steps=200` and `row 3 of data`.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

SHORT_FLAGS: Mapping[str, str] = {
    "model.path": "model",
    "data.train": "data",
    "rewards": "reward",
    "algorithm.recipe": "algorithm",
    "train.backend": "train-backend",
    "rollout.backend": "rollout-backend",
    "trust_run": "trust-run",
    "samples_per_prompt": "samples-per-prompt",
}
"""Field -> the flag by which messages call it, without dashes; all others are flags of the same name."""
ARGUMENTS: Mapping[str, str] = {
    "model.path": "model",
    "data.train": "data",
    "data.eval": "eval_data",
    "rewards": "reward",
    "algorithm.recipe": "algorithm",
    "trainer.steps": "steps",
    "trainer.run_name": "run_name",
    "trainer.seed": "seed",
    "prompt": "prompts",
    "set": "sets",
    **{name: name for name in ("calibration", "checkpoint", "config", "hardware", "trust_run")},
}
"""Field, or flag of one command -> its argument in Python."""
TAKEN = frozenset({"model", "data", "algorithm"})
"""Sections whose name is an argument for something else: their fields are keywords of their own, with two
underscores for each dot."""


@dataclass(frozen=True)
class Setting:
    """A field of the configuration, or an argument of a command, with a value or without. As text, it is what the
    reader types."""

    path: str
    """Dotted path of the field, or name of the argument."""
    value: object = ...
    """A placeholder is a text in capitals: `FOLDER`. `...`: none."""

    def __str__(self) -> str:
        return self.as_flag() if reader() is None else self.as_keyword()

    def as_flag(self) -> str:
        """`--trainer.steps 5`, as typed in a shell."""
        flag = f"--{SHORT_FLAGS.get(self.path, self.path)}"
        if self.value is ... or (self.path == "trust_run" and self.value is True):
            return flag
        text = _flow(self.value)
        return f"{flag} {text if isinstance(self.value, bool | int | float | None) else shlex.quote(text)}"

    def as_keyword(self) -> str:
        """`trainer={'steps': 5}`, or `data__num_eval_rows=5`, as written in a call."""
        name = ARGUMENTS.get(self.path)
        if self.path == "data.eval" and (call := reader()) is not None:
            name = call.eval_data
        if self.value is ...:
            return name or self.path
        section, *inside = self.path.split(".")
        if name is not None:
            return f"{name}={self.value!r}"
        if section in TAKEN or not inside:
            keyword = self.path.replace(".", "__")
            return f"{keyword}={self.value!r}" if keyword.isidentifier() else f"**{{{self.path!r}: {self.value!r}}}"
        value = repr(self.value)
        for part in reversed(inside):
            value = f"{{{part!r}: {value}}}"
        return f"{section}={value}"


def _flow(value: object) -> str:
    """A value as YAML on one line."""
    if isinstance(value, bool | None):
        return "null" if value is None else str(value).lower()
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_flow(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_flow, value))}]"
    return str(value).replace("e-0", "e-") if isinstance(value, float) else str(value)


def spell(*settings: Setting) -> str:
    """Several settings in a row, as they are typed together."""
    return (" " if reader() is None else ", ").join(map(str, settings))


def as_given(path: str, value: object) -> str:
    """An argument with the value that was given for it, at the beginning of a message."""
    return f"{Setting(path)}{' ' if reader() is None else '='}{value!r}"


@dataclass(kw_only=True, eq=False)
class PythonCall:
    """What a call from Python gave as objects, which were written to files."""

    names: dict[str, str] = field(default_factory=dict)
    """File, or `file.py:function` -> the argument or the function that it holds."""
    eval_data: str = "eval_data"
    """The argument with evaluation rows."""


_calls: list[PythonCall] = []
"""The newest one counts; empty: the command line. Of the whole process, since a run makes messages in many threads."""


@contextmanager
def spelled_for(call: PythonCall) -> Iterator[None]:
    """Messages that are made in the block, in any thread, are for the author of this call."""
    _calls.append(call)
    try:
        yield
    finally:
        _calls.remove(call)


def reader() -> PythonCall | None:
    """The call whose author messages are for; None: the command line. Child processes are given it."""
    return _calls[-1] if _calls else None


def set_reader(call: PythonCall) -> None:
    """All messages of this process are for the author of this call."""
    _calls.append(call)


def called(name: str | os.PathLike[str]) -> str:
    """What the reader calls a file or a function: its name, or the argument by which it was given."""
    name, call = os.fspath(name), reader()
    return name if call is None else call.names.get(name, name)


def row_of(file: str | os.PathLike[str], line: int | str) -> str:
    """What the reader calls a line of a file: `rows.jsonl:3`, or `row 3 of data`."""
    name = called(file)
    return f"{name}:{line}" if name == os.fspath(file) else f"row {line} of {name}"


def source_of(row: str) -> str:
    """The file, or the argument, of a name that `row_of` gave."""
    argument, call = row.partition(" of ")[2], reader()
    is_object = call is not None and argument in call.names.values()
    return argument if is_object else row.rpartition(":")[0] or row


def under(path: str, name: str) -> str:
    """The beginning of a message about the data source `name` of a field: `data.train: `. Empty for objects of a call,
    whose messages begin with the argument."""
    return f"{path}: " if called(name) == name else ""


def number_of(path: str, number: int) -> str:
    """What the reader calls the value of this number, from 1, of an argument that may be repeated."""
    return f"--{path} {number}" if reader() is None else f"{ARGUMENTS[path]}[{number - 1}]"
