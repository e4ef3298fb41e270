"""Writes the tables of docs/coming_from.md from the names that rlsdk answers: `python tools/foreign_names.py`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from rlsdk.config.loading.foreign_names import FOREIGN_NAMES, NOT_FIELDS

PAGE = Path(__file__).parents[1] / "docs" / "coming_from.md"


def fields_table() -> str:
    """Field -> the names of others."""
    rows: dict[str, list[str]] = {}
    for name, choices in FOREIGN_NAMES.items():
        fields = ", ".join(f"`{choice[0]}`" for choice in choices)
        rows.setdefault(fields, []).append(f"`{name}`")
    lines = [f"| {fields} | {', '.join(names)} |" for fields, names in sorted(rows.items())]
    return "\n".join(["| here | elsewhere |", "|---|---|", *lines])


def answers_table() -> str:
    """Names without a field -> what to do."""
    rows: dict[str, list[str]] = {}
    for name, text in NOT_FIELDS.items():
        rows.setdefault(text.replace("docs/coming_from.md", "this page"), []).append(f"`{name}`")
    lines = [f"| {', '.join(names)} | {text} |" for text, names in rows.items()]
    return "\n".join(["| elsewhere | here |", "|---|---|", *lines])


def page(text: str) -> str:
    """The page with both tables as they are now."""
    tables: Mapping[str, str] = {"names": fields_table(), "answers": answers_table()}
    for name, table in tables.items():
        text = re.sub(
            rf"<!-- {name} -->\n.*?<!-- /{name} -->",
            lambda found, name=name, table=table: f"<!-- {name} -->\n{table}\n<!-- /{name} -->",  # type: ignore[misc]
            text,
            flags=re.S,
        )
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
