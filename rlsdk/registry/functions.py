"""Loads functions by name: `pkg.mod:fn` or `path/file.py:fn`, with errors that suggest the nearest name."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from rlsdk.interfaces import ConfigError, nearest
from rlsdk.interfaces.errors import nearest_file
from rlsdk.registry.guard import Guard
from rlsdk.system.printable import described


def load_function(
    target: str, *, what: str, takes: Sequence[str], options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Loads the function `target`, and checks that it accepts the arguments of its later calls.

    Args:
        target: `pkg.mod:fn` or `path/file.py:fn`.
        what: its purpose, for errors: "reward".
        takes: names of the positional arguments that it will be called with.
        options: keyword arguments that it will be called with.

    Raises:
        ConfigError: no such file, module or function (with the nearest name), or it cannot be called that way.
    """
    function = find_function(target, what=what)
    check_call(function, takes=takes, options=options or {}, said=f"{what} {target!r}")
    return function


def find_function(target: str, *, what: str) -> Callable[..., Any]:
    """As `load_function`, without checking the signature."""
    said = f"{what} {target!r}"
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name:
        raise ConfigError(f"{said}: expected pkg.mod:function or path/file.py:function")
    module = _load_file(Path(where), said) if where.endswith(".py") else _load_module(where, said)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{said}: {_why_not(module, name)}")
    found: Callable[..., Any] = function
    return found


def absolute(target: str) -> str:
    """The name with an absolute path, for processes in other folders."""
    where, _, name = target.rpartition(":")
    return f"{Path(where).expanduser().resolve()}:{name}" if where.endswith(".py") else target


def _load_module(name: str, said: str) -> ModuleType:
    try:
        _use_current_folder([name.partition(".")[0]])
        with Guard():
            return importlib.import_module(name)
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}.")
        advice = ". Is it installed, or in the current folder? A file is given as path/file.py:function"
        raise ConfigError(f"{said}: {_said(error, name)}{advice if missing else ''}") from error


def python_file(path: Path, said: str) -> Path:
    """The absolute path of a file that is there.

    Raises:
        ConfigError: it is not, with the nearest name in that folder; begins with `said`.
    """
    try:
        path = path.expanduser().absolute()
        if path.is_file():
            return path
        near, _ = nearest_file(path, [".py"])
    except (OSError, RuntimeError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{said}: {str(path)!r} cannot be opened: {why}; check the name and its permissions"
        ) from error
    raise ConfigError(f"{said}: there is no file {str(path)!r}{near}")


def _load_file(path: Path, said: str) -> ModuleType:
    path = python_file(path, said).resolve()
    # Named after its path, so that files with equal names do not collide.
    name = f"_rlsdk_file_{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{said}: {str(path)!r} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # for modules next to it; last, so that they hide nothing
    _use_current_folder(_imported(path, set()))
    try:
        with Guard():
            spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"{said}: {_said(error, str(path))}") from error
    return module


def _use_current_folder(names: Iterable[str]) -> None:
    """Imports from the current folder from now on, behind all else, if the user's code needs it: one of these modules
    is there and nowhere else. Without need it is not used, because a library may look for a module that is not
    installed, and a folder of a stranger may have one."""
    lacking = [name for name in names if name not in sys.modules and importlib.util.find_spec(name) is None]
    with suppress(OSError):  # the current folder was removed
        here = os.getcwd()
        if here not in sys.path and any(PathFinder.find_spec(name, [here]) is not None for name in lacking):
            sys.path.append(here)


def _imported(path: Path, seen: set[Path]) -> set[str]:
    """Top-level names that a file imports, also inside functions, and those that modules beside it import."""
    seen.add(path)
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return set()  # importing it says what is wrong
    names = {name.partition(".")[0] for node in ast.walk(tree) for name in _names(node)}
    beside = [file for name in names for file in (path.with_name(f"{name}.py"), path.parent / name / "__init__.py")]
    return names.union(*(_imported(file, seen) for file in beside if file not in seen and file.is_file()))


def _names(node: ast.AST) -> Sequence[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module is not None and not node.level else []


def _said(error: Exception, what: str) -> str:
    return f"importing {what!r} failed: {described(error)}"


def _why_not(module: ModuleType, name: str) -> str:
    functions = [n for n, value in vars(module).items() if inspect.isfunction(value) and not n.startswith("_")]
    own = sorted(n for n in functions if getattr(module, n).__module__ == module.__name__)
    own = own or [n for n, value in vars(module).items() if _is_own_class(module, n, value)] or sorted(functions)
    found = vars(module).get(name)
    is_what = f"{name!r} is a {type(found).__name__}, not a function" if found is not None else f"no function {name!r}"
    return f"{is_what}{nearest(name, own)}; {module.__file__} has {own}"


def _is_own_class(module: ModuleType, name: str, value: object) -> bool:
    return inspect.isclass(value) and value.__module__ == module.__name__ and not name.startswith("_")


def check_call(function: Callable[..., Any], *, takes: Sequence[str], options: Mapping[str, Any], said: str) -> None:
    """Refuses a function that cannot be called with these positional arguments and options.

    Raises:
        ConfigError: begins with `said`.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # a built-in without a signature
    names = list(signature.parameters)[len(takes) :]
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
    for option in options:
        if option not in names and not takes_any:
            raise ConfigError(f"{said} has no option {option!r}{nearest(option, names)}; it has {names}")
    try:
        signature.bind(*takes, **options)
    except TypeError as error:
        if inspect.isclass(function):
            raise ConfigError(
                f"{said} is a class, and is called as fn({', '.join(takes)}): give an object of it with `__call__`, "
                f"made in the same file (`mine = {function.__name__}(...)`, named as `:mine`), or a function"
            ) from error
        raise ConfigError(
            f"{said} is called as fn({', '.join(takes)}, **options) with options {sorted(options)}, but its "
            f"signature is {signature}: {error}"
        ) from error
