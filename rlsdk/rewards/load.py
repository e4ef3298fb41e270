"""Finds reward functions by name, marks them, and names them for other processes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rlsdk.interfaces import ConfigError
from rlsdk.registry import check_call, find_function
from rlsdk.rewards.signatures import adapted

F = TypeVar("F", bound=Callable[..., Any])


def prepared_by(prepare: Callable[[], object]) -> Callable[[F], F]:
    """Marks a reward function with a function to call once before the first sample: slow imports, tables, models.

    It counts towards the start-up time of the grading process, not towards a sample's time limit.
    """

    def mark(function: F) -> F:
        function.prepare = prepare  # type: ignore[attr-defined]  # an attribute on a function, as `batched` is
        return function

    return mark


def checks_rows(function: F) -> F:
    """Marks a reward function that is fast for an empty response, and then raises ValueError for a row that it cannot
    grade for any response: rows are checked with it before a run starts."""
    function.checks_rows = True  # type: ignore[attr-defined]
    return function


def target_of(function: Callable[..., Any]) -> str:
    """Import string with which another process can load this function: `module:name`, or `file.py:name` for the running
    script.

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
    """Loads the reward `target`, `pkg.mod:fn` or `path/file.py:fn`, and checks that it accepts a sample and these
    options; a function with the signature of TRL or verl is wrapped.

    Raises:
        ConfigError: no such file, module or function (with the nearest name), or it cannot be called that way.
    """
    function = find_function(target, what="reward")
    wrapped = adapted(function, options or {}, f"reward {target!r}")
    if wrapped is function:
        check_call(function, takes=("sample",), options=options or {}, said=f"reward {target!r}")
    return wrapped
