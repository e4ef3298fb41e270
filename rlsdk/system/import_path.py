"""Where this process and its children import from: never from the current folder before an installed package.

A run or its data may come from a stranger, and a command may be typed in their folder. Python puts the current folder
first for `python -m` and `python -c`, and wherever `PYTHONPATH` has an empty entry or `.`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

PYTHON_PATH = "PYTHONPATH"
SAFE_PATH = "PYTHONSAFEPATH"
"""Environment variable: an interpreter that is started with `-m`, `-c` or a script imports neither from the current
folder nor from the script's. Engines start such processes by themselves."""


def leave_current_folder() -> None:
    """Stops this process, a command, from importing what lies in the current folder, and cleans `PYTHONPATH` for its
    children. A current folder that `PYTHONPATH` names by its absolute path stays, and so does an installed one (an
    editable install)."""
    here = _current_folder()
    named = [os.path.abspath(path) for path in _given() if os.path.isabs(path)]
    standard_library = os.path.dirname(os.__file__)
    first = sys.path.index(standard_library) if standard_library in sys.path else 0
    sys.path[:first] = [path for path in sys.path[:first] if not _is_here(path, here) or here in named]
    if PYTHON_PATH in os.environ:
        os.environ[PYTHON_PATH] = clean_python_path()


def clean_python_path() -> str:
    """`PYTHONPATH` of this process for its children: without entries that mean the current folder of whoever reads
    them; relative ones as absolute."""
    here = _current_folder()
    return os.pathsep.join(_absolute([path for path in _given() if not _is_here(path, here) or os.path.isabs(path)]))


def child_environment() -> dict[str, str]:
    """Environment variables of this process for a child that is started with `-P`."""
    return {**os.environ, PYTHON_PATH: clean_python_path()}


def import_folders() -> list[str]:
    """Absolute folders from which this process imports, for its children (see `add_import_folders`)."""
    return _absolute(sys.path)


def add_import_folders(folders: Iterable[str]) -> None:
    """Lets this process import what its parent can. They come last, so that they hide no package of its own."""
    sys.path += [path for path in folders if path not in sys.path]


def _given() -> list[str]:
    return os.environ.get(PYTHON_PATH, "").split(os.pathsep)


def _current_folder() -> str | None:
    """None: it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return None


def _absolute(paths: Iterable[str]) -> list[str]:
    """Leaves relative ones out where the current folder was removed."""
    here = _current_folder()
    return [os.path.normpath(os.path.join(here or "", path)) for path in paths if here or os.path.isabs(path)]


def _is_here(path: str, here: str | None) -> bool:
    return not path or (here is not None and os.path.normpath(os.path.join(here, path)) == here)
