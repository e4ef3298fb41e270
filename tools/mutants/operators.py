"""Small changes of Python source: what a hand that slips would write. Standard library alone."""

from __future__ import annotations

import ast
import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
"""Operator -> the one that takes its place."""
REVERSED = {ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt}
"""A comparison the other way round, beside the one of `SWAPPED` that differs where both sides are equal."""
TWINS = {
    **{"min": "max", "max": "min", "any": "all", "all": "any", "argmin": "argmax", "argmax": "argmin"},
    **{"zeros": "ones", "new_zeros": "new_ones", "zeros_like": "ones_like", "cumsum": "cumprod"},
    **{"flatnonzero": "nonzero", "minimum": "maximum", "maximum": "minimum", "add_": "sub_", "popleft": "pop"},
}
"""Function -> the one that takes its place."""
PASSED_THROUGH = {
    *("detach", "clone", "contiguous", "float", "double", "to", "copy", "abs", "clamp", "sorted", "tuple", "list"),
    *("reversed", "item", "cpu", "removeprefix", "aclosing"),
}
"""Calls that can be left out: what they are called on, or their only argument, stands in their place."""


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    number: int
    """Among those of the file."""
    line: int
    operator: str
    before: str
    after: str


def mutants(source: str) -> list[Mutant]:
    """Every change that is known here, in the order of the file. Messages of errors, types and docstrings stay."""
    found = enumerate(_changed(ast.parse(source)))
    return [Mutant(at, old.lineno, operator, _short(old), _short(new)) for at, (operator, old, new) in found]


def mutated(source: str, number: int) -> str:
    """The source with one of its changes."""
    tree = ast.parse(source)
    next(itertools.islice(_changed(tree), number, None))
    return ast.unparse(ast.fix_missing_locations(tree))


def _changed(tree: ast.Module) -> Iterator[tuple[str, ast.expr | ast.stmt, ast.AST]]:
    """Each change: its operator, the node, what stands in its place; the tree has it until the next is asked for."""
    for parent, name, index, node in list(_places(tree)):
        held = getattr(parent, name)
        for operator, new in _changes(node):
            put = [new if i == index else item for i, item in enumerate(held)] if index is not None else new
            setattr(parent, name, put)
            yield operator, node, new
            setattr(parent, name, held)


def _places(node: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.expr | ast.stmt]]:
    """Each node that can be changed: what holds it, in which field and place."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "type_params", "exc"):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(child, ast.AST) or _is_left_alone(node, child):
                continue
            if isinstance(child, ast.expr | ast.stmt):
                yield node, name, index, child
            yield from _places(child)


def _is_left_alone(parent: ast.AST, node: ast.AST) -> bool:
    """Imports, docstrings, formatted text, constants of modules, and what type checkers alone read."""
    if isinstance(node, ast.Import | ast.ImportFrom | ast.JoinedStr | ast.Assert | ast.Global | ast.Nonlocal):
        return True
    if isinstance(parent, ast.Module) and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return True
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _changes(node: ast.expr | ast.stmt) -> Iterator[tuple[str, ast.AST]]:
    """What may stand in a node's place."""
    match node:
        case ast.Compare(ops=[op]):
            for table in (SWAPPED, REVERSED):
                if type(op) in table:
                    yield "comparison", _with(node, ops=[table[type(op)]()])
        case ast.BoolOp(op=op):
            yield "and / or", _with(node, op=SWAPPED[type(op)]())
            yield from (
                ("removed condition", _with(node, values=node.values[:i] + node.values[i + 1 :]))
                for i in range(len(node.values))
                if len(node.values) > 2
            )
        case ast.BinOp(op=op, left=left, right=right) if type(op) in SWAPPED:
            if not any(isinstance(side, ast.Constant) and isinstance(side.value, str) for side in (left, right)):
                yield "arithmetic", _with(node, op=SWAPPED[type(op)]())
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert(), operand=operand):
            yield "removed sign", operand
        case ast.Constant(value=bool(value)):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield "constant", ast.Constant(value + 1)
        case ast.Constant(value=float(value)):
            yield "constant", ast.Constant(value * 2 if value else 1.0)
        case ast.IfExp(body=body, orelse=orelse):
            yield "swapped branches", _with(node, body=orelse, orelse=body)
        case ast.Slice(lower=lower, upper=upper):
            if lower is not None:
                yield "removed bound", _with(node, lower=None)
            if upper is not None:
                yield "removed bound", _with(node, upper=None)
        case ast.Call(func=func, args=args, keywords=keywords):
            called = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
            if called in TWINS:
                twin = TWINS[called]
                new = _with(func, attr=twin) if isinstance(func, ast.Attribute) else ast.Name(twin, ast.Load())
                yield "other function", _with(node, func=new)
            if called in PASSED_THROUGH and isinstance(func, ast.Attribute):
                yield "removed call", func.value
            elif called in PASSED_THROUGH and len(args) == 1:
                yield "removed call", args[0]
            if len(args) == 2:
                yield "swapped arguments", _with(node, args=[args[1], args[0]])
            for i, keyword in enumerate(keywords):
                if keyword.arg not in (None, "strict"):
                    yield "removed argument", _with(node, keywords=keywords[:i] + keywords[i + 1 :])
        case ast.ListComp(generators=[one]) | ast.GeneratorExp(generators=[one]) if one.ifs:
            yield "removed filter", _with(node, generators=[_with(one, ifs=[])])
        case ast.If(test=test) if not isinstance(test, ast.Compare):
            yield "negated condition", _with(node, test=ast.UnaryOp(ast.Not(), test))
        case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
            if all(item.optional_vars is None for item in items):
                yield "removed context", ast.If(ast.Constant(True), body, [])
        case ast.Break():
            yield "break / continue", ast.Continue()
        case ast.Continue():
            yield "break / continue", ast.Break()
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Delete() | ast.Raise():
            yield "removed statement", ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            yield "removed statement", ast.Pass()


def _with(node: ast.AST, **fields: object) -> ast.AST:
    """The node with other fields."""
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def _short(node: ast.AST) -> str:
    text = " ".join(ast.unparse(ast.fix_missing_locations(node)).split())
    return text if len(text) <= 100 else f"{text[:97]}..."
