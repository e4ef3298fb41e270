"""Loads reward functions by name, marks their properties, and names them for other processes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rlsdk.interfaces import ConfigError
from rlsdk.interfaces.spelling import called
from rlsdk.registry import check_call, find_function
from rlsdk.rewards.functions.signatures import adapt, awaited

F = TypeVar("F", bound=Callable[..., Any])


def prepared_by(prepare: Callable[[], object]) -> Callable[[F], F]:
    """Marks a reward function with a function to call once before the first sample: slow imports, tables, models.

    Its time counts towards the startup of the grading process, not towards a sample's time limit.
    """

    def mark(function: F) -> F:
        function.prepare = prepare  # type: ignore[attr-defined]  # an attribute on a function, as `batched` is
        return function

    return mark


def checks_rows(function: F) -> F:
    """Marks a reward function that can check rows of the data before a run starts.

    Called with an empty response, such a function is fast, and raises ValueError for a row that it cannot grade.
    """
    function.checks_rows = True  # type: ignore[attr-defined]
    return function


def target_of(function: Callable[..., Any]) -> str:
    """Returns the import string with which another process can load this function: `module:name`, or `file.py:name` for
    the running script.

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
    """Loads the reward function `target`, and checks that it accepts a sample and these options.

    A function with the signature of TRL or verl is wrapped, and so is an async one, which is awaited.

    Args:
        target: `pkg.mod:fn` or `path/file.py:fn`.
        options: keyword arguments of its calls.

    Raises:
        ConfigError: the file, module or function does not exist (the message gives the nearest name), or the function
            does not accept the arguments.
    """
    function = awaited(find_function(target, what="reward"))
    wrapped = adapt(function, options or {}, f"reward {called(target)!r}")
    if wrapped is function:
        check_call(function, takes=("sample",), options=options or {}, said=f"reward {called(target)!r}")
    return wrapped
