"""Data and rewards that are passed as Python objects: written to files, so that a run can be read, resumed and
evaluated like one from the command line."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

from rlsdk.api.functions import standalone_source
from rlsdk.api.settings import Settings, plain
from rlsdk.config import RunConfig
from rlsdk.interfaces import ConfigError, DataError
from rlsdk.interfaces.spelling import PythonCall, spelled_for
from rlsdk.system.atomic import atomic_path
from rlsdk.system.temporary import held_folder
from rlsdk.trainer.checkpoints.run_folder import INPUTS

Rows: TypeAlias = "str | os.PathLike[str] | Iterable[Mapping[str, Any]]"
"""A data source by name, or rows: a list of mappings, a `datasets.Dataset`, a generator."""
Term: TypeAlias = "str | Callable[..., Any] | Mapping[str, Any]"
"""A registered reward or `file.py:fn`, a function, or `{"name": either, "weight": ..., "options": ...}`."""
Reward: TypeAlias = "Term | Sequence[Term]"
"""One term, or several that are added."""


@dataclass(frozen=True, kw_only=True)
class PythonInputs:
    """Settings whose objects were written to files in a temporary folder."""

    settings: Settings
    folder: Path | None = None
    """Folder of these files; None: there are none."""
    call: PythonCall = field(default_factory=PythonCall)
    """How messages call these objects."""

    def moved(self, config: RunConfig, run_dir: Path) -> RunConfig:
        """Copies the files into the run's folder atomically; returns the configuration that names them."""
        files = sorted(self.folder.iterdir()) if self.folder is not None else []
        for file in files:
            with atomic_path(run_dir / INPUTS / file.name) as draft:
                draft.write_bytes(file.read_bytes())
        if self.folder is None or not files:
            return config
        old, new = f"{self.folder}{os.sep}", f"{run_dir / INPUTS}{os.sep}"
        self.call.names.update({_replaced(file, old, new): name for file, name in self.call.names.items()})
        return RunConfig.model_validate(_replaced(config.model_dump(), old, new))


def _replaced(value: Any, old: str, new: str) -> Any:
    if isinstance(value, str):
        return value.replace(old, new) if value.startswith(old) else value
    if isinstance(value, Mapping):
        return {key: _replaced(item, old, new) for key, item in value.items()}
    return type(value)(_replaced(item, old, new) for item in value) if isinstance(value, list | tuple) else value


@contextmanager
def stage_inputs(
    settings: Settings,
    *,
    data: Rows | None = None,
    eval_data: Rows | None = None,
    reward: Reward | None = None,
    eval_argument: str = "eval_data",
) -> Iterator[PythonInputs]:
    """Yields the settings with data and rewards; objects are written to a temporary folder that exists during the
    block. Messages inside name rows and fields as the caller did.

    Args:
        settings: of the call.
        data: of training.
        eval_data: of evaluation.
        reward: one term, or several.
        eval_argument: what the caller calls `eval_data`.

    Raises:
        DataError: a row is not a mapping, or is not JSON; or there are no rows.
        ConfigError: a reward cannot be used in another process; gives the reason.
    """
    values = plain(settings.values)
    with held_folder("given") as made:
        folder = Path(os.path.realpath(made))
        call = PythonCall(eval_data=eval_argument)
        section = values.setdefault("data", {})
        for name, rows, argument in (("train", data, "data"), ("eval", eval_data, eval_argument)):
            if rows is not None:
                section[name] = os.fspath(rows) if _is_name(rows) else str(write_rows(rows, folder, name, argument))
                call.names[section[name]] = argument
        if reward is not None:
            values["rewards"] = [_term(term, folder, call.names) for term in _terms(reward)]
        given = Settings(files=settings.files, values=values, flags=settings.flags)
        with spelled_for(call):
            yield PythonInputs(settings=given, folder=folder, call=call)


def _is_name(rows: Any) -> TypeGuard[str | os.PathLike[str]]:
    return isinstance(rows, str | os.PathLike)


def write_rows(rows: Any, folder: Path, name: str, argument: str) -> Path:
    """Writes rows as JSON lines; the file's name contains a hash of its content. Errors name the argument
    `argument`.

    Raises:
        DataError: as `stage_inputs`.
    """
    from rlsdk.data.rows import to_row

    digest, count, draft = hashlib.blake2b(digest_size=6), 0, folder / f".{name}"
    if not isinstance(rows, Iterable):
        raise DataError(f"{argument}: expected a name or rows (mappings of fields), got a {type(rows).__name__}")
    if isinstance(rows, Mapping):
        raise DataError(
            f"{argument}: expected rows, got one mapping with {sorted(map(str, rows))[:5]}; give a list of rows"
        )
    with draft.open("wb") as file:
        for count, row in enumerate(rows, 1):
            line = json.dumps(dict(to_row(row, f"row {count} of {argument}").row)).encode() + b"\n"
            digest.update(line)
            file.write(line)
    if not count:
        raise DataError(f"{argument}: has no rows; expected at least one mapping of fields")
    path = folder / f"{name}-{digest.hexdigest()}.jsonl"
    return draft.rename(path)


def _terms(reward: Any) -> list[Any]:
    return list(reward) if isinstance(reward, Sequence) and not isinstance(reward, str) else [reward]


def _term(term: Any, folder: Path, names: dict[str, str]) -> dict[str, Any]:
    """One term of the reward, in the form of the configuration; `names` receives the function."""
    fields = {**term} if isinstance(term, Mapping) else {"name": term}
    function = fields.get("name")
    options = dict(fields.get("options") or {})
    while isinstance(function, functools.partial):
        if function.args:
            raise ConfigError(f"reward {function!r}: hand values over by name: functools.partial(fn, name=value)")
        options, function = {**function.keywords, **options}, function.func
    if callable(function):
        fields["name"] = target = target_of(function, folder)
        names[target] = function.__name__
    elif not isinstance(function, str | os.PathLike):
        raise ConfigError(
            f"reward: {function!r}, a {type(function).__name__}; expected a function, a registered name, 'file.py:fn', "
            "a mapping with `name` and `options`, or a list of these"
        )
    made: dict[str, Any] = plain({**fields, **({"options": options} if options else {})})
    return made


def target_of(function: Callable[..., Any], folder: Path) -> str:
    """Import string with which another process loads a function: from its module, or from a file written here.

    Raises:
        ConfigError: neither is possible; gives the reason.
    """
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    name = getattr(function, "__qualname__", "<object>")
    if module is not None and module.__name__ != "__main__" and getattr(module, name, None) is function:
        file = getattr(module, "__file__", None)
        if file is None or not _stands_alone(module.__name__, file):
            return f"{module.__name__}:{name}"
        return f"{os.path.abspath(file)}:{name}"
    source = standalone_source(function)
    digest = hashlib.blake2b(source.encode(), digest_size=4).hexdigest()
    path = folder / f"{re.sub(r'[^A-Za-z0-9_]', '_', inspect.unwrap(function).__name__)}_{digest}.py"
    path.write_text(source, encoding="utf-8")
    return f"{path}:{function.__name__}"


def _stands_alone(module: str, file: str) -> bool:
    """Whether a file is neither part of a package nor installed, so that its path identifies it."""
    installed = {"site-packages", "dist-packages"} & set(Path(file).parts)
    return "." not in module and file.endswith(".py") and Path(file).name != "__init__.py" and not installed
