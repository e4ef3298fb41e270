"""Reads and writes YAML with the scalars of YAML 1.2: `1e-6` is a number, `no` and `2024-01-01` are strings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from rlsdk.config.loading.yaml_errors import explain_syntax
from rlsdk.interfaces import ConfigError

Path = tuple[str | int, ...]

_FLOAT = re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$")
_SCALARS = (
    ("tag:yaml.org,2002:bool", re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), "tTfF"),
    ("tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9]+$|^0x[0-9a-fA-F]+$"), "-+0123456789"),
    ("tag:yaml.org,2002:float", _FLOAT, "-+0123456789."),
    ("tag:yaml.org,2002:null", re.compile(r"^(~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
)


MAX_DEPTH = 64
"""Deepest nesting of mappings and lists."""
MAX_VALUES = 100_000
"""Largest number of nodes of one document: aliases of aliases expand a few lines to billions."""
MAX_INT_DIGITS = 1000
"""Most digits of a number; Python's own limit is 4,300."""
_TOO_DEEP = f"nested more than {MAX_DEPTH} levels deep"
_PLAIN = frozenset({"map", "seq", "str", "int", "float", "bool", "null"})


class _Loader(yaml.SafeLoader):
    """A safe loader: builds only plain data, and refuses duplicate keys."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own design


class _Dumper(yaml.SafeDumper):
    """Quotes exactly the strings that `_Loader` would not read as strings."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own design


def _int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    # PyYAML would read 010 as octal and 1:30 as sixty-based.
    text = node.value.replace("+", "")
    if len(text) > MAX_INT_DIGITS:
        line = node.start_mark.line + 1
        raise ConfigError(
            f"{loader.name}:{line}: an integer of {len(text):,} digits; expected at most {MAX_INT_DIGITS}"
        )
    return int(text, 16) if text.lower().startswith("0x") else int(text)


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # PyYAML writes these as line breaks, which are read back as another one; in double quotes it escapes them.
    style = '"' if set(text) & set("\x85\u2028\u2029\ufeff") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


for _tag, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(_tag, _pattern, _first)
    _Dumper.add_implicit_resolver(_tag, _pattern, _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _int)
_Dumper.add_representer(str, _text)


def read_yaml(text: str, name: str) -> tuple[Any, dict[Path, int]]:
    """Parses YAML text.

    Args:
        text: one document.
        name: what error messages call it.

    Returns:
        The data, and the 1-based line on which each key's value stands.

    Raises:
        ConfigError: not YAML, a duplicate key or one that is no text, or a tag that is not plain data.
    """
    try:
        loader = _Loader(text)
        loader.name = name
        node = loader.get_single_node()
        if node is None:
            return None, {}
        lines: dict[Path, int] = {}
        for place, line in _lines(node, (), name, set()):
            lines[place] = line
            if len(lines) > MAX_VALUES:
                raise ConfigError(
                    f"{name}:{line}: more than {MAX_VALUES:,} values, counting those of aliases each time"
                )
        return loader.construct_document(node), lines
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise ConfigError(f"{name}:{line}: {explain_syntax(error, text)}; expected YAML") from error
    except RecursionError as error:
        raise ConfigError(f"{name}: {_TOO_DEEP}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise error if isinstance(error, ConfigError) else ConfigError(f"{name}: {error}; expected YAML") from error


def read_value(text: str) -> Any:
    """The value of a text on the command line; text that is not YAML is returned as a string."""
    try:
        value, _ = read_yaml(text, "value")
    except ConfigError:
        return text
    return text if value is None and not text else value


def write_yaml(data: Any) -> str:
    """YAML text that `read_yaml` reads back equal."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=False)


def _is_text(value: str) -> bool:
    """Whether the text can be encoded as UTF-8."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _lines(node: yaml.Node, path: Path, name: str, above: set[int]) -> Iterator[tuple[Path, int]]:
    yield path, node.start_mark.line + 1
    if len(path) > MAX_DEPTH:
        raise ConfigError(f"{name}:{node.start_mark.line + 1}: {_TOO_DEEP}")
    if isinstance(node, yaml.ScalarNode) and not _is_text(node.value):
        raise ConfigError(f"{name}:{node.start_mark.line + 1}: half a surrogate pair (\\ud800 to \\udfff) is no text")
    if id(node) in above:
        raise ConfigError(f"{name}:{node.start_mark.line + 1}: an alias that contains itself")
    above = above | {id(node)}
    if node.tag.removeprefix("tag:yaml.org,2002:") not in _PLAIN:
        raise ConfigError(f"{name}:{node.start_mark.line + 1}: tag {node.tag!r}: expected plain data")
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _lines(item, (*path, index), name, above)
    elif isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.tag != "tag:yaml.org,2002:str":
                raise ConfigError(f"{name}:{line}: key {key.value!r}: expected a text (quote it)")
            if not _is_text(key.value):
                raise ConfigError(f"{name}:{line}: key {key.value!r}: half a surrogate pair is no text")
            if key.value in seen:
                raise ConfigError(f"{name}:{line}: duplicate key {key.value!r}")
            seen.add(key.value)
            yield from _lines(value, (*path, key.value), name, above)
