"""An environment class: its tools with their schemas, and what of a data row its `reset` takes."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlsdk.interfaces import ConfigError, DataError, Tool, nearest

HOOKS = frozenset({"reset", "get_reward", "turn_reward", "close"})
"""Methods with a meaning of their own: they are no tools."""
TOOL_SCHEMA = "tool_schema"
"""Attribute of a method whose description and parameters are known already, as of tools of a server: a mapping with
`description` and `parameters`."""
STATELESS = "stateless"
"""Attribute of a class: names of tools whose result depends on their arguments alone, and that change nothing in the
object; True: all of them. After a kill their results are taken from the journal."""
CUT = "\n[... {count} characters left out ...]\n"


@dataclass(frozen=True, kw_only=True)
class EnvironmentClass:
    """A class that is an environment, read once."""

    make: Callable[..., Any]
    """Called with the configured options: one object a sample."""
    name: str
    tools: tuple[Tool, ...]
    """JSON schemas, in the order in which the class defines them."""
    parameters: tuple[str, ...]
    """Names of `reset`'s parameters."""
    required: tuple[str, ...]
    """Those without a default."""
    takes_all: bool
    """`reset` takes every field of a row (`**row`)."""
    stateless: frozenset[str] = frozenset()
    """Tools whose result depends on their arguments alone, and that change nothing in the object."""

    @classmethod
    def of(cls, make: Any, name: str) -> EnvironmentClass:
        """Reads a class.

        Raises:
            ConfigError: it is no environment, or a tool lacks type hints or a docstring.
        """
        if not inspect.isclass(make):
            raise ConfigError(f"environment {name!r} is {make!r}; expected a class: one object is made for each sample")
        reset = getattr(make, "reset", None)
        if not callable(reset):
            public = sorted(one for one in vars(make) if not one.startswith("_"))
            raise ConfigError(
                f"environment {name!r} has no method `reset`{nearest('reset', public)}; write "
                "`def reset(self, **row) -> str`, which returns what the model sees after the prompt"
            )
        names = tool_names(make)
        signature = inspect.signature(reset)
        own = [one for at, one in enumerate(signature.parameters.values()) if at]
        named = [one for one in own if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
        return cls(
            make=make,
            name=name,
            tools=tuple(_schema(getattr(make, tool), tool, name) for tool in names),
            parameters=tuple(one.name for one in named),
            required=tuple(one.name for one in named if one.default is one.empty),
            takes_all=any(one.kind is one.VAR_KEYWORD for one in own),
            stateless=_stateless(make, names, name),
        )

    def arguments(self, row: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """The arguments of `reset` for a data row.

        Raises:
            DataError: the row lacks a field that `reset` needs.
        """
        given = {**row, "seed": seed} if "seed" in self.parameters and "seed" not in row else dict(row)
        for name in self.required:
            if name not in given:
                raise DataError(
                    f"environment {self.name!r}: `reset` needs {name!r}, and the row has no such field"
                    f"{nearest(name, row)}; it has {sorted(row)}. Add the field, or give the parameter a default"
                )
        return {name: value for name, value in given.items() if self.takes_all or name in self.parameters}


def tool_names(make: type) -> list[str]:
    """Names of the public methods that are tools, in the order of their definition; those of parents first."""
    names: dict[str, None] = {}
    for parent in reversed(make.__mro__[:-1]):
        names |= dict.fromkeys(name for name in vars(parent) if not name.startswith("_"))
    return [name for name in names if name not in HOOKS and inspect.isfunction(inspect.getattr_static(make, name))]


def _stateless(make: type, tools: Sequence[str], environment: str) -> frozenset[str]:
    """The tools that a class names in its attribute `stateless`; True: all of them.

    Raises:
        ConfigError: it names something else.
    """
    declared = getattr(make, STATELESS, False)
    if STATELESS in tools or declared is False:
        return frozenset()
    if declared is True:
        return frozenset(tools)
    named = declared if isinstance(declared, list | tuple | set | frozenset) else [declared]
    for name in named:
        if name not in tools:
            raise ConfigError(
                f"environment {environment!r}: stateless names {name!r}{nearest(str(name), tools)}; expected True, or "
                f"names of its tools, {list(tools)}"
            )
    return frozenset(named)


def text_of_result(result: Any) -> str:
    """What the model sees of a tool's result: text as it is, nothing of None, and JSON of all else.

    Raises:
        TypeError: it has no such form.
    """
    if isinstance(result, str):
        return result.encode("utf-8", "replace").decode("utf-8")  # half a surrogate pair cannot be tokenized
    if result is None:
        return ""
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        raise TypeError(f"a tool returned {type(result).__name__}; expected text, or what JSON has") from None


def cut_text(text: str, most: int) -> str:
    """The text, or its beginning and end if it is longer than `most` characters."""
    if len(text) <= most:
        return text
    note = CUT.format(count=len(text) - most)
    return text[: (most + 1) // 2] + note + (text[-(most // 2) :] if most > 1 else "")


def _schema(method: Any, tool: str, environment: str) -> Tool:
    if isinstance(ready := getattr(method, TOOL_SCHEMA, None), Mapping):
        return {"type": "function", "function": {**ready, "name": tool}}
    from transformers.utils import get_json_schema

    try:
        schema: Tool = get_json_schema(method)
        schema = {**schema, "function": {**schema["function"], "name": tool}}  # a method may be a function of any name
        json.dumps(schema)
    except Exception as error:  # of hints and docstrings of a stranger
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"environment {environment!r}: tool `{tool}` cannot be described to a model: {why}. Give it a docstring "
            "with one line for each argument under `Args:`, and type hints; begin its name with `_` if it is no tool"
        ) from error
    return schema
