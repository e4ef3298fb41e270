"""Sources whose statements note that they ran. Standard library alone."""

from __future__ import annotations

import ast


def instrumented(source: str, path: str) -> str:
    """The source with a note, `PATH:LINE`, before every statement of a function, for each line of the statement's
    head. Those of modules and classes run when they are imported."""
    tree = ast.parse(source)
    for function in [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]:
        head = [_hit(path, line) for line in _head(function)]
        _note(function, path)
        function.body = head + function.body
    place = next(
        i for i, s in enumerate(tree.body) if not isinstance(s, ast.Expr | ast.ImportFrom) or _is_plain_import(s)
    )
    tree.body.insert(place, ast.parse("from mutants_hits import hits as _mutants_hits").body[0])
    return ast.unparse(ast.fix_missing_locations(tree))


def _note(holder: ast.AST, path: str) -> None:
    for name in ("body", "orelse", "finalbody"):
        statements = getattr(holder, name, None)
        if not isinstance(statements, list):
            continue
        noted: list[ast.stmt] = []
        for statement in statements:
            if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                _note(statement, path)
            noted += [*(_hit(path, line) for line in _head(statement)), statement]
        setattr(holder, name, noted)
    for part in (*getattr(holder, "handlers", ()), *getattr(holder, "cases", ())):
        _note(part, path)


def _head(statement: ast.stmt) -> range:
    """Lines of a statement, those of its blocks left out."""
    first_below = getattr(statement, "body", None)
    last = first_below[0].lineno - 1 if isinstance(first_below, list) and first_below else statement.end_lineno
    return range(statement.lineno, max(last or 0, statement.lineno) + 1)


def _hit(path: str, line: int) -> ast.stmt:
    return ast.parse(f"_mutants_hits.add({f'{path}:{line}'!r})").body[0]


def _is_plain_import(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.ImportFrom) and statement.module != "__future__"
