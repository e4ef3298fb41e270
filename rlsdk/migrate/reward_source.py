"""Reward functions and environments of a training script as a module of their own: importing the script would import
the trainer."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

DEFINING = (
    ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign,
)  # fmt: skip
"""Statements that give a name a meaning."""
HEAD = '"""Functions and classes of {source}, with what they use; written by `rlsdk migrate`."""\n'


def reward_module(text: str, functions: Sequence[str], source: str) -> str:
    """A module with some functions of a script, and the imports, values, functions and classes that they use.

    Args:
        text: the script, which is Python.
        functions: their names.
        source: the file, for the module's docstring.
    """
    made = list(_definitions(ast.parse(text).body))
    needed = _needed(made, functions)
    lines = text.splitlines()
    used = [node for node in made if _names(node) & needed]
    imports = [_import(node, needed) for node in used if isinstance(node, ast.Import | ast.ImportFrom)]
    others = [_source(node, lines) for node in used if not isinstance(node, ast.Import | ast.ImportFrom)]
    parts = ["\n".join(imports), *others]
    future = "from __future__ import annotations\n"
    return "\n\n".join([HEAD.format(source=source) + "\n" + future, *(part for part in parts if part)]) + "\n"


def _definitions(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that give a name a meaning, also those inside of functions and branches that train."""
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            continue
        if isinstance(node, DEFINING):
            yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            yield from _definitions(node.body)
            yield from _definitions(getattr(node, "orelse", []))
        elif isinstance(node, ast.FunctionDef) and any(
            isinstance(part, ast.FunctionDef | ast.ClassDef) for part in node.body
        ):
            yield from _definitions(node.body)


def _names(node: ast.stmt) -> set[str]:
    """The names that a statement defines."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {
        part.id for target in targets if target is not None for part in ast.walk(target) if isinstance(part, ast.Name)
    }


def _needed(made: Sequence[ast.stmt], functions: Sequence[str]) -> set[str]:
    """The names that these functions use, and those use, and so on."""
    needed, fresh = set(functions), set(functions)
    while fresh:
        used = {
            part.id
            for node in made
            if _names(node) & fresh
            for part in ast.walk(node)
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)
        }
        fresh = used - needed
        needed |= fresh
    return needed


def _import(node: ast.Import | ast.ImportFrom, needed: set[str]) -> str:
    """The import without names that nobody here uses."""
    kept = [alias for alias in node.names if (alias.asname or alias.name.partition(".")[0]) in needed]
    return ast.unparse(type(node)(**{**{name: getattr(node, name) for name in node._fields}, "names": kept}))


def _source(node: ast.stmt, lines: Sequence[str]) -> str:
    """The statement as written, with its decorators, at the left margin."""
    first = min([node.lineno, *(item.lineno for item in getattr(node, "decorator_list", []))]) - 1
    indent = node.col_offset
    return "\n".join(line[indent:] if not line[:indent].strip() else line for line in lines[first : node.end_lineno])
