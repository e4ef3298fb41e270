"""Functions of a script that make a prompt of a row: a system message and one field, which have fields of their own."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from rlsdk.migrate.draft import Unknown
from rlsdk.migrate.values import value_of

Function = ast.FunctionDef | ast.AsyncFunctionDef
ANSWERS = frozenset({"answer", "solution", "ground_truth"})


def prompt_settings(node: Function | None, names: Mapping[str, Any]) -> Mapping[str, Any]:
    """The parts of a prompt that a function of rows makes; empty if it does anything else.

    Args:
        node: the function.
        names: values of names in the script.

    Returns:
        `user message` and an answer's name, with fields of the row; `system message`, with its text.
    """
    made = [item.value for item in ast.walk(node) if isinstance(item, ast.Return)] if node is not None else []
    if len(made) != 1 or not isinstance(made[0], ast.Dict):
        return {}
    parts = _entries(made[0])
    prompt = parts.pop("prompt", None)
    if set(parts) - ANSWERS or not isinstance(prompt, ast.List):
        return {}
    messages: dict[str, ast.expr] = {}
    for message in prompt.elts:
        entry = _entries(message) if isinstance(message, ast.Dict) else {}
        role = value_of(entry["role"], {}) if "role" in entry else ""
        if role not in ("system", "user") or "content" not in entry:
            return {}
        messages[role] = entry["content"]
    user = _field(messages.get("user"))
    answers = {key: _field(item) for key, item in parts.items()}
    system = value_of(messages["system"], names) if "system" in messages else ""
    if user is None or None in answers.values() or len(answers) > 1 or isinstance(system, Unknown):
        return {}
    return {"user message": user, **answers, **({"system message": system} if system else {})}


def _entries(node: ast.Dict) -> dict[Any, ast.expr]:
    return {value_of(key, {}): item for key, item in zip(node.keys, node.values, strict=True) if key}


def _field(node: ast.expr | None) -> str | None:
    """The name in `example["name"]`."""
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and isinstance(node.slice, ast.Constant):
        return str(node.slice.value)
    return None
