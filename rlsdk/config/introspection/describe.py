"""Describes options: dotted path, type, default and documentation, read from dataclasses and pydantic models."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import re
import sys
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlsdk.config.introspection.fields import is_plain, option_fields, section_of
from rlsdk.registry import DOC


@dataclass(frozen=True, kw_only=True)
class OptionDoc:
    """One option, as shown to users."""

    path: str
    """Dotted path, relative to the described class."""
    type: str
    default: str
    """Default as YAML; empty for a required option."""
    doc: str


def option_paths(options: type[Any], prefix: str = "") -> Iterator[str]:
    """Dotted paths of the options that `describe_options` yields, without reading source code."""
    for name, annotation in option_fields(options).items():
        section = section_of(annotation)
        if section is None:
            yield prefix + name
        else:
            yield from option_paths(section, f"{prefix}{name}.")


def describe_options(options: type[Any], prefix: str = "") -> Iterator[OptionDoc]:
    """Yields every option of a dataclass or pydantic model, in the order of its fields; nested sections are
    expanded."""
    docs = option_texts(options)
    defaults = option_defaults(options)
    for name, annotation in option_fields(options).items():
        section = section_of(annotation)
        if section is not None:
            yield from describe_options(section, f"{prefix}{name}.")
        else:
            yield OptionDoc(
                path=prefix + name,
                type=type_text(annotation),
                default=_value_text(defaults[name]) if name in defaults else "",
                doc=docs.get(name, ""),
            )


def type_text(annotation: Any) -> str:
    """A type as shown to users: `int`, `text or null`, `list of int`, `'auto' or 'always'`."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_text(arguments[0])
    if origin is typing.Literal:
        return " or ".join(map(repr, arguments))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_text(argument) for argument in arguments)
    if origin in (list, tuple, set, frozenset):
        items = dict.fromkeys(type_text(argument) for argument in arguments if argument is not Ellipsis)
        return f"list of {' and '.join(items)}"
    if annotation is dict or origin is dict:
        return "mapping"
    if (section := section_of(annotation)) is not None:
        return f"{{{', '.join(option_fields(section))}}}"
    names = {str: "text", type(None): "null", bool: "true or false", Any: "anything"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def option_defaults(options: type[Any]) -> dict[str, Any]:
    """Defaults of the fields that have one."""
    if is_plain(options):
        found = {f.name: f.default for f in dataclasses.fields(options) if f.default is not dataclasses.MISSING}
        made = {f.name: f.default_factory for f in dataclasses.fields(options)}
        return found | {name: make() for name, make in made.items() if make is not dataclasses.MISSING}
    fields: Mapping[str, Any] = getattr(options, "model_fields", {})
    return {n: f.get_default(call_default_factory=True) for n, f in fields.items() if not f.is_required()}


def _value_text(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, tuple | list | set | frozenset):
        return f"[{', '.join(map(_value_text, value))}]"
    return str(value) if isinstance(value, str) and value else repr(value)


def option_texts(options: type[Any]) -> dict[str, str]:
    """Docstrings under the fields of a class and of its bases, from pydantic's `description` or, for a class that was
    built from a description, from the fields' metadata."""
    docs: dict[str, str] = {}
    for base in reversed(options.__mro__[:-1]):
        docs |= _source_docstrings(base)
    fields: Mapping[str, Any] = getattr(options, "model_fields", {})
    docs |= {name: field.description for name, field in fields.items() if field.description}
    if is_plain(options):
        docs |= {field.name: field.metadata[DOC] for field in dataclasses.fields(options) if DOC in field.metadata}
    return {name: re.sub(r"\s+", " ", doc).strip() for name, doc in docs.items()}


def _source_docstrings(options: type[Any]) -> dict[str, str]:
    found = _classes_of(options.__module__).get(options.__qualname__)
    if found is None:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(options)))
        except (OSError, TypeError, SyntaxError):
            return {}  # Without source, options are shown without documentation.
        found = tree.body[0] if tree.body and isinstance(tree.body[0], ast.ClassDef) else None
    return {
        field.target.id: text.value.value
        for field, text in itertools.pairwise([] if found is None else found.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


@functools.cache
def _classes_of(module: str) -> Mapping[str, ast.ClassDef]:
    """Classes in a module's source by qualified name, parsed once per module. Empty without source."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError, SyntaxError):
        return {}
    found: dict[str, ast.ClassDef] = {}

    def look(nodes: Iterable[ast.AST], prefix: str) -> None:
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                found[prefix + node.name] = node
                look(node.body, f"{prefix}{node.name}.")

    look(tree.body, "")
    return found
