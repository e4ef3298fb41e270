"""The run file as commented YAML, and the table of what became of each setting."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from rlsdk.config import RunConfig
from rlsdk.config.loading.yaml_text import write_yaml
from rlsdk.migrate.draft import Draft, Fate, Row, Unknown

WIDTH = 110


def run_file(draft: Draft) -> str:
    """YAML with a comment on each field that says where it comes from, and the settings that are not in it on top."""
    script = draft.script
    lines = [
        f"# From {script.source} ({script.peer}, {script.trainer}), by `rlsdk migrate`.",
        f"# Start: rlsdk {script.command} --config THIS_FILE",
    ]
    missing = [row for row in draft.rows if row.fate is Fate.REFUSED]
    if missing:
        lines += ["#", "# Not in this file:"]
        for row in missing:
            lines += _wrapped(f"{row.name} {shown(row.value)}: {row.why}", "#   ", "#     ")
    tree: dict[str, Any] = {}
    for path in sorted(draft.fields, key=_place):
        _put(tree, path.split("."), path)
    lines += list(_lines(tree, draft, 0))
    return "\n".join(lines) + "\n"


def _place(path: str) -> tuple[int, str]:
    sections = list(RunConfig.model_fields)
    section, _, rest = path.partition(".")
    return sections.index(section), rest


def _put(tree: dict[str, Any], parts: list[str], path: str) -> None:
    for part in parts[:-1]:
        inner = tree.setdefault(part, {})
        assert isinstance(inner, dict), f"{path} is inside a value"
        tree = inner
    tree[parts[-1]] = path


def _lines(tree: Mapping[str, Any], draft: Draft, depth: int) -> Iterator[str]:
    indent = "  " * depth
    for name, inside in tree.items():
        if not depth:
            yield ""
        if isinstance(inside, dict):
            yield f"{indent}{name}:"
            yield from _lines(inside, draft, depth + 1)
            continue
        if note := draft.notes.get(inside):
            yield from _wrapped(note, f"{indent}# ", f"{indent}# ")
        yield from (indent + line for line in _value(name, draft.fields[inside]))


def _value(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, str) and "\n" in value.strip() and all(line.isprintable() for line in value.split("\n")):
        yield f"{name}: |-"
        yield from (f"  {line}" if line else "" for line in value.rstrip("\n").split("\n"))
    else:
        yield from write_yaml({name: value}).rstrip("\n").splitlines()


def table(draft: Draft) -> str:
    """What became of each setting, by kind."""
    parts = [f"{draft.script.source}: {draft.script.peer}, {draft.script.trainer} -> rlsdk {draft.script.command}"]
    for fate in Fate:
        rows = [row for row in draft.rows if row.fate is fate and not row.is_default]
        rows += [row for row in draft.rows if row.fate is fate and row.is_default]
        if rows:
            parts.append(f"\n{fate.value} ({len(rows)})")
            parts += [line for row in rows for line in _row(row)]
    return "\n".join(parts)


def _row(row: Row) -> list[str]:
    given = f"{row.name} {shown(row.value)}" + (" (its default)" if row.is_default else "")
    ours = "; ".join(row.fields)
    text = " | ".join(part for part in (given, ours, row.why) if part)
    return _wrapped(text, "  ", "      ")


def shown(value: Any) -> str:
    """A value in a table, on one line."""
    text = str(value) if isinstance(value, str | Unknown) else repr(value)
    return " ".join(text.split())


def _wrapped(text: str, first: str, further: str) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), WIDTH, initial_indent=first, subsequent_indent=further,
                         break_long_words=False, break_on_hyphens=False)  # fmt: skip


def summary(draft: Draft) -> Mapping[Fate, int]:
    """Number of given settings of each fate; one that has several rows counts as its best."""
    order = list(Fate)
    best: dict[str, Fate] = {}
    for row in draft.rows:
        if not row.is_default:
            known = best.get(row.name, row.fate)
            best[row.name] = min(known, row.fate, key=order.index)
    return {fate: sum(1 for found in best.values() if found is fate) for fate in order}


def parsed(text: str) -> Any:
    """The run file as data, for checks."""
    return yaml.safe_load(text)
