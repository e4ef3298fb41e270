"""Values of Python expressions that the text alone tells. Nothing is run."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from rlsdk.migrate.draft import Unknown

MAX_POWER = 64
"""Largest exponent that is computed."""
MAX_TEXT = 1 << 16
"""Longest text or list that is built."""
_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
DTYPES_OF = frozenset({"torch", "np", "jnp"})
"""Modules whose attributes are dtypes."""
_CASTS: Mapping[str, Callable[[Any], Any]] = {"int": int, "float": float, "str": str, "bool": bool}


def value_of(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """The value of an expression; `Unknown` with its text if it needs the program to run.

    Args:
        node: the expression.
        names: values of names, and of `object.attribute`.
    """
    try:
        return _value(node, names)
    except (_UntoldError, ArithmeticError, TypeError, ValueError):
        return Unknown(ast.unparse(node))


class _UntoldError(Exception):
    """The text does not tell a value."""


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return _named(node.id, names)
        case ast.Attribute():
            return _attribute(node, names)
        case ast.List() | ast.Tuple() | ast.Set():
            return [_value(item, names) for item in node.elts]
        case ast.Dict():
            return {_value(_key(key), names): value_of(item, names) for key, item in zip(node.keys, node.values)}  # noqa: B905
        case ast.JoinedStr():
            return "".join(str(_value(part, names)) for part in node.values)
        case ast.FormattedValue(format_spec=None, value=inner):
            return _value(inner, names)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner, names)
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            return not _value(inner, names)
        case ast.BoolOp(op=ast.Or(), values=[first, *others]) if others:
            return _value(first, names) or _value(others[0], names)
        case ast.IfExp():
            return _value(node.body if _value(node.test, names) else node.orelse, names)
        case ast.BinOp():
            return _computed(node, names)
        case ast.Call():
            return _call(node, names)
    raise _UntoldError


def _key(key: ast.expr | None) -> ast.expr:
    if key is None:
        raise _UntoldError
    return key


def _named(name: str, names: Mapping[str, Any]) -> Any:
    found = names.get(name, Unknown(name))
    if isinstance(found, Unknown):
        raise _UntoldError
    return found


def _attribute(node: ast.Attribute, names: Mapping[str, Any]) -> Any:
    owner = node.value.id if isinstance(node.value, ast.Name) else ""
    if owner in DTYPES_OF:
        return node.attr  # torch.bfloat16
    found = names.get(f"{owner}.{node.attr}", names.get(f".{node.attr}", Unknown(node.attr)))
    if isinstance(found, Unknown):
        raise _UntoldError
    return found


def _computed(node: ast.BinOp, names: Mapping[str, Any]) -> Any:
    left, right = _value(node.left, names), _value(node.right, names)
    if isinstance(node.op, ast.Pow) and isinstance(right, int) and abs(right) <= MAX_POWER and left == 2:
        return left**right
    if type(node.op) not in _OPERATORS:
        raise _UntoldError
    if isinstance(node.op, ast.Mult) and not (isinstance(left, int | float) and isinstance(right, int | float)):
        raise _UntoldError
    result = _OPERATORS[type(node.op)](left, right)
    if isinstance(result, str | list) and len(result) > MAX_TEXT:
        raise _UntoldError
    return result


def _call(node: ast.Call, names: Mapping[str, Any]) -> Any:
    """`dict(a=1)`, `int("3")`, `os.environ.get("NAME", 3)`."""
    called = ast.unparse(node.func)
    if called == "dict" and not node.args:
        return {keyword.arg: value_of(keyword.value, names) for keyword in node.keywords if keyword.arg is not None}
    if called in _CASTS and len(node.args) == 1 and not node.keywords:
        return _CASTS[called](_value(node.args[0], names))
    if called in ("os.environ.get", "os.getenv", "environ.get") and len(node.args) == 2:
        return _value(node.args[1], names)
    if isinstance(node.func, ast.Attribute) and node.func.attr == "strip" and not node.args:
        return _value(node.func.value, names).strip()
    if called in ("textwrap.dedent", "dedent", "inspect.cleandoc") and len(node.args) == 1:
        import textwrap

        return textwrap.dedent(_value(node.args[0], names))
    raise _UntoldError
