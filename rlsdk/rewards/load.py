"""From `pkg.mod:fn` or `path/file.py:fn` to a function, with errors that name the nearest one."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from rlsdk.interfaces import ConfigError, nearest

F = TypeVar("F", bound=Callable[..., Any])


def prepared_by(prepare: Callable[[], object]) -> Callable[[F], F]:
    """Marks a reward function with what to call once before the first sample: slow imports, tables, models.

    It counts towards the start-up time of the grading process, not towards a sample's time limit.
    """

    def mark(function: F) -> F:
        function.prepare = prepare  # type: ignore[attr-defined]  # an attribute on a function, as `batched` is
        return function

    return mark


def target_of(function: Callable[..., Any]) -> str:
    """The text by which another process can load this function: `module:name`, or `file.py:name` for the script that
    is being run.

    Raises:
        ConfigError: it has no importable name (a lambda, a nested function, an object).
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "<object>")
    if not module or "<" in name or "." in name:
        raise ConfigError(
            f"reward {name!r} of module {module!r} cannot be loaded in the grading process; define it as a plain "
            f"function at the top level of a module or file"
        )
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    return f"{Path(script).resolve()}:{name}" if module == "__main__" and script else f"{module}:{name}"


def load_function(target: str, options: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """The function that `target` names, checked to take one argument and these options.

    Args:
        target: `pkg.mod:fn` or `path/file.py:fn`.
        options: keyword arguments that it will be called with.

    Raises:
        ConfigError: no such file, module or function (with the nearest name), or it cannot be called that way.
    """
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name:
        raise ConfigError(f"reward {target!r}: expected pkg.mod:function or path/file.py:function")
    module = _load_file(Path(where), target) if where.endswith(".py") else _load_module(where, target)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"reward {target!r}: {_why_not(module, name)}")
    _check_call(function, options or {}, target)
    checked: Callable[..., Any] = function
    return checked


def _load_module(name: str, target: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}.")
        advice = ". Is it installed, or in the current folder? A file is given as path/file.py:function"
        raise ConfigError(f"reward {target!r}: {_said(error, name)}{advice if missing else ''}") from error


def _load_file(path: Path, target: str) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        files = [entry.name for entry in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise ConfigError(f"reward {target!r}: there is no file {str(path)!r}{nearest(path.name, files)}")
    # Named after its place, so that two files of one name do not stand in each other's way.
    name = f"_rlsdk_reward_{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"reward {target!r}: {str(path)!r} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # its neighbours; last, so that they hide nothing
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"reward {target!r}: {_said(error, str(path))}") from error
    return module


def _said(error: Exception, what: str) -> str:
    return f"importing {what!r} failed: {type(error).__name__}: {error}"


def _why_not(module: ModuleType, name: str) -> str:
    functions = [n for n, value in vars(module).items() if inspect.isfunction(value) and not n.startswith("_")]
    own = sorted(n for n in functions if getattr(module, n).__module__ == module.__name__) or sorted(functions)
    found = vars(module).get(name)
    is_what = f"{name!r} is a {type(found).__name__}, not a function" if found is not None else f"no function {name!r}"
    return f"{is_what}{nearest(name, own)}; {module.__file__} has {own}"


def _check_call(function: Callable[..., Any], options: Mapping[str, Any], target: str) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # built in: Python does not tell
    names = list(signature.parameters)[1:]
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
    for option in options:
        if option not in names and not takes_any:
            raise ConfigError(f"reward {target!r} has no option {option!r}{nearest(option, names)}; it has {names}")
    try:
        signature.bind(object(), **options)
    except TypeError as error:
        raise ConfigError(
            f"reward {target!r} is called as fn(sample, **options) with options {sorted(options)}, but its signature "
            f"is {signature}: {error}"
        ) from error
