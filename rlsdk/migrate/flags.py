"""The arguments of a command as settings: flags with values, `key=value`, and the text of values as data."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlsdk.config.loading.yaml_text import read_value
from rlsdk.interfaces import ConfigError
from rlsdk.migrate.draft import Setting, Unknown

_UNSET = re.compile(r"\$\{?[A-Za-z_(]|\{[a-z_ ]+\}\Z|\A<[A-Za-z_ ]+>")
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}


def data(text: str) -> Any:
    """The value of a text; `Unknown` if it holds a variable that the script does not set."""
    if _UNSET.search(text):
        return Unknown(text)
    if text in _WORDS:
        return _WORDS[text]
    if text[:1] in ("'", '"') and text[-1:] == text[:1] and len(text) > 1:
        return text[1:-1]
    try:
        value = read_value(
            re.sub(r"\bTrue\b", "true", re.sub(r"\bFalse\b", "false", text)) if text[:1] in "[{" else text
        )
    except ConfigError:
        return text
    return value if value is not None else text


def flags(words: Sequence[str], where: str, renamed: Mapping[str, str], *, dashes: bool = True) -> dict[str, Setting]:
    """Settings of `--name value`, `--name=value`, `--name` and `--name value value`.

    Args:
        words: the arguments.
        where: the file, for messages.
        renamed: name as typed -> name of the setting.
        dashes: whether dashes in a name stand for underscores.
    """
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2 and not word.startswith("--$"):
            name, assigned, text = word[2:].partition("=")
            name = name.replace("-", "_") if dashes else name
            found[name] = [text] if assigned else []
        elif name and not re.fullmatch(r"\d?>+.*|<.*", word):
            found[name].append(word.rstrip(",") if len(word) > 1 else word)
        elif re.fullmatch(r"\d?>+.*|<.*", word):
            break
    settings: dict[str, Setting] = {}
    for given, values in found.items():
        full = renamed.get(given, given)
        value: Any = True if not values else data(values[0]) if len(values) == 1 else [data(item) for item in values]
        if any(isinstance(item, Unknown) for item in (value if isinstance(value, list) else [])):
            value = Unknown(" ".join(values))
        settings[full] = Setting(name=full, value=value, where=where)
    return settings


def assignments(words: Iterable[str], where: str) -> dict[str, Setting]:
    """Settings of Hydra's `key=value`, `+key=value`, `++key=value` and `~key`."""
    found: dict[str, Setting] = {}
    for word in words:
        match = re.fullmatch(r"(\+{0,2}|~)([A-Za-z_][\w.@/-]*)(?:=(.*))?", word, re.S)
        if match is None or (match[3] is None and match[1] != "~"):
            continue
        name = match[2]
        found[name] = Setting(name=name, value=None if match[1] == "~" else data(match[3]), where=where)
    return found


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings under dotted names."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
