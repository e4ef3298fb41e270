"""Writes a function of a script or a notebook as a self-contained Python file, which another process can load.

The file also contains what the function uses: imports, plain values, and other functions and classes of the same kind.
Nothing is pickled: the file is readable, still exists when the run is resumed, and its hash identifies it.
"""

from __future__ import annotations

import ast
import builtins
import dis
import inspect
import math
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

from rlsdk.interfaces import ConfigError

MAX_VALUE_CHARS = 1 << 20
"""Most characters of a value that a function uses, as Python source."""
_MISSING = object()


def standalone_source(function: Callable[..., Any]) -> str:
    """Source of a Python file that defines the function under its own name, with all that it uses.

    Raises:
        ConfigError: its source cannot be found (a lambda, an object, a function typed at a prompt without history), or
            it uses something that cannot be written down; names it, and what to do.
    """
    if not isinstance(function, FunctionType) or function.__name__ == "<lambda>":
        what = "a lambda" if isinstance(function, FunctionType) else _described(function)
        raise ConfigError(
            f"reward: {what}; expected a function written with `def`: a lambda or an object has no source that another "
            "process could load. Write `def score(sample): ...`, or put it into a module"
        )
    writer = _Writer(function.__name__)
    writer.add(function.__name__, function, decorated=True)
    return writer.text()


class _Writer:
    """Collects definitions in the order in which they depend on one another."""

    def __init__(self, reward: str) -> None:
        self._reward = reward
        self._names: dict[str, object] = {}
        self._imports: list[str] = []
        self._parts: list[str] = []

    def text(self) -> str:
        imports = ["from __future__ import annotations", *dict.fromkeys(self._imports)]
        return "\n".join(imports) + "\n\n" + "\n\n".join(self._parts) + "\n"

    def add(self, name: str, value: object, *, decorated: bool) -> None:
        """Defines `name` as `value` in the file.

        Args:
            name: as the function that needs it spells it.
            value: a function, a class, a module, or plain data.
            decorated: a function is what its decorators made of it, which are written down with it.
        """
        if (known := self._names.get(name, _MISSING)) is not _MISSING:
            if known is not value:
                raise self._refusal(name, value, "and another one of that name is used, too")
            return
        self._names[name] = value
        if (line := _import_of(name, value)) is not None:
            self._imports.append(line)
        elif isinstance(value, FunctionType | type):
            self._define(name, value, decorated=decorated)
        else:
            self._parts.append(f"{name} = {self._literal(name, value)}")

    def _define(self, name: str, value: FunctionType | type, *, decorated: bool) -> None:
        node = self._node(name, value)
        if not decorated:
            node.decorator_list = []
        for used, found, is_global in _used(node, value):
            if found is _MISSING:
                if hasattr(builtins, used):
                    continue
                raise self._refusal(used, None, "which is not defined")
            self.add(used, found, decorated=is_global)
        self._parts.append(ast.unparse(node))
        if node.name != name:
            self._parts.append(f"{name} = {node.name}")
        attributes = vars(value) if isinstance(value, FunctionType) else {}
        for attribute, held in attributes.items():
            if attribute == "__wrapped__":
                continue
            if isinstance(held, FunctionType):
                self.add(held.__name__, held, decorated=True)
            text = held.__name__ if isinstance(held, FunctionType) else self._literal(attribute, held)
            self._parts.append(f"{name}.{attribute} = {text}")

    def _node(self, name: str, value: FunctionType | type) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(value)))
        except (OSError, TypeError, SyntaxError) as error:
            raise self._refusal(name, value, f"whose source cannot be read ({error})") from error
        node = tree.body[0]
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            raise self._refusal(name, value, "whose source is no `def` or `class` of its own")
        return node

    def _literal(self, name: str, value: object) -> str:
        if isinstance(value, re.Pattern):
            self._imports.append("import re as _re")
            flags = int(value.flags & ~re.UNICODE if isinstance(value.pattern, str) else value.flags)
            return f"_re.compile({value.pattern!r}, {flags})"
        if not _is_plain(value):
            raise self._refusal(name, value, "which cannot be written as Python")
        text = repr(value)
        if len(text) > MAX_VALUE_CHARS:
            raise self._refusal(name, value, f"which is longer than {MAX_VALUE_CHARS:,} characters as Python")
        return text

    def _refusal(self, name: str, value: object, why: str) -> ConfigError:
        what = "" if value is None else f", {_described(value)}"
        return ConfigError(
            f"reward {self._reward!r} uses {name!r}{what}, {why}. Rewards run in processes of their own, from a file "
            f"in the run's folder: make {name!r} inside the function, hand a plain value over with functools.partial, "
            "or put the function into a module (module.py) and give it from there"
        )


def _used(node: ast.AST, value: FunctionType | type) -> Iterator[tuple[str, object, bool]]:
    """Names that a definition looks up outside itself: (name, value, whether it is global)."""
    closed: Mapping[str, object] = {}
    if isinstance(value, FunctionType):
        scope = value.__globals__
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        closed = {name: _content(cell) for name, cell in cells}
        names = {*_globals(inspect.unwrap(value).__code__), *_outer_names(node)}
    else:
        scope = vars(sys.modules[value.__module__])
        local = {
            inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
        }
        arguments = {argument.arg for argument in ast.walk(node) if isinstance(argument, ast.arg)}
        loaded = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
        names = loaded - local - arguments - {value.__name__}
    for name in sorted(closed):
        yield name, closed[name], False
    for name in sorted(names - set(closed)):
        yield name, scope.get(name, _MISSING), True


def _content(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING


def _globals(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield str(instruction.argval)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _globals(inner)


def _outer_names(node: ast.AST) -> set[str]:
    """Names in decorators and defaults, which are looked up at definition."""
    arguments = getattr(node, "args", None)
    defaults = [*arguments.defaults, *arguments.kw_defaults] if arguments else []
    roots = [*getattr(node, "decorator_list", []), *(default for default in defaults if default is not None)]
    return {inner.id for root in roots for inner in ast.walk(root) if isinstance(inner, ast.Name)}


def _import_of(name: str, value: object) -> str | None:
    """The import statement for this name; None if no other process can import it."""
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}" if value.__name__ != "__main__" else None
    module, path = getattr(value, "__module__", None), getattr(value, "__qualname__", "<>")
    if not isinstance(module, str) or module == "__main__" or "<" in path or "." in path:
        return None
    found = getattr(sys.modules.get(module), path, None)
    return f"from {module} import {path} as {name}" if found is value else None


def _is_plain(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if type(value) in (bool, int, str, bytes, type(None)):
        return True
    if type(value) in (list, tuple, set, frozenset):
        return all(map(_is_plain, value))  # type: ignore[call-overload]  # one of these four
    return type(value) is dict and all(_is_plain(key) and _is_plain(item) for key, item in value.items())


def _described(value: object) -> str:
    kind = type(value)
    return f"a {kind.__name__}" if kind.__module__ == "builtins" else f"a {kind.__module__}.{kind.__name__}"
