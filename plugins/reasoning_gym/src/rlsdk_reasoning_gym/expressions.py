"""A strict grammar for expressions and lists in model output. Nothing is evaluated as Python.

`ast.parse` turns text into a syntax tree without compiling or running it. Every node is checked against a short list
of allowed kinds, and this module evaluates the tree. Length, depth, digits and powers are bounded, so `9**9**9` is
rejected at once.
"""

from __future__ import annotations

import ast
import re
import warnings
from fractions import Fraction
from typing import TypeAlias

MAX_CHARS = 1_000
MAX_LITERAL_CHARS = 16_384
MAX_BRACKETS = 32
"""Maximum nesting of brackets."""
MAX_DEPTH = 200
"""Maximum depth of the tree; each further term of a sum adds one level."""
MAX_DIGITS = 18
"""Maximum number of digits of one number."""
MAX_EXPONENT = 200
MAX_BITS = 4_096
"""Maximum size of a numerator, a denominator, or a coefficient."""
MAX_TERMS = 1_000
"""Maximum number of terms of a polynomial."""

_ARITHMETIC = re.compile(r"[0-9.+\-*/() \t\n]*")
_ALGEBRA = re.compile(r"[A-Za-z0-9.+\-*/() \t\n]*")
_LONG_NUMBER = re.compile(rf"[0-9]{{{MAX_DIGITS + 1}}}|[0-9][eE][+-]?[0-9]{{3}}")
_BINARY = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow)
_UNARY = (ast.UAdd, ast.USub)

Literal: TypeAlias = "int | float | str | list[Literal]"
Monomial: TypeAlias = tuple[tuple[str, int], ...]
"""Sorted (variable, exponent) pairs, exponents above 0."""
Polynomial: TypeAlias = dict[Monomial, Fraction]


class GrammarError(ValueError):
    """The text does not follow the grammar, or exceeds its bounds."""


def parse_arithmetic(text: str) -> ast.expr:
    """Parses an expression of numbers, `+ - * / **` and brackets. Raises `GrammarError` for anything else."""
    return _checked(_parse(text, _ARITHMETIC), frozenset())


def parse_algebra(text: str, functions: frozenset[str] = frozenset()) -> ast.expr:
    """Like `parse_arithmetic`, and also allows names, and calls of `functions` with one argument."""
    return _checked(_parse(text, _ALGEBRA), functions)


def parse_literal(text: str) -> Literal:
    """Parses a number, a string, or a list (or tuple) of literals, in Python or JSON notation.

    Raises `GrammarError` for anything else.
    """
    return _literal(_parse(text, None))


def whole_numbers(node: ast.expr) -> list[int]:
    """Returns the numbers of an arithmetic expression. Raises `GrammarError` if one is not an integer."""
    found = [child.value for child in ast.walk(node) if isinstance(child, ast.Constant)]
    if not all(type(value) is int for value in found):
        raise GrammarError("a number is not an integer")
    return [int(str(value)) for value in found]


def value_of(node: ast.expr) -> Fraction:
    """Returns the exact value of an arithmetic expression.

    Raises:
        GrammarError: the expression is not arithmetic, or a value exceeds the bounds.
        ZeroDivisionError: it divides by zero.
    """
    if isinstance(node, ast.Constant):
        return constant(node)
    if isinstance(node, ast.UnaryOp):
        inner = value_of(node.operand)
        return -inner if isinstance(node.op, ast.USub) else inner
    if not isinstance(node, ast.BinOp):
        raise GrammarError("not arithmetic")
    left, right = value_of(node.left), value_of(node.right)
    match node.op:
        case ast.Add():
            return _bounded(left + right)
        case ast.Sub():
            return _bounded(left - right)
        case ast.Mult():
            return _bounded(left * right)
        case ast.Div():
            return _bounded(left / right)
    return _power(left, right)


def polynomial_of(node: ast.expr) -> Polynomial:
    """Returns the terms of an expanded polynomial. Raises `GrammarError` for others, such as a product of two sums."""
    if isinstance(node, ast.Constant):
        return _without_zeros({(): constant(node)})
    if isinstance(node, ast.Name):
        return {((node.id, 1),): Fraction(1)}
    if isinstance(node, ast.UnaryOp):
        inner = polynomial_of(node.operand)
        return _scaled(inner, Fraction(-1)) if isinstance(node.op, ast.USub) else inner
    if not isinstance(node, ast.BinOp):
        raise GrammarError("not a polynomial")
    left, right = polynomial_of(node.left), polynomial_of(node.right)
    match node.op:
        case ast.Add():
            return _sum(left, right)
        case ast.Sub():
            return _sum(left, _scaled(right, Fraction(-1)))
        case ast.Mult():
            return _product(left, right)
        case ast.Div():
            return _scaled(left, 1 / _number(right))
    return _monomial_power(left, _number(right))


def constant(node: ast.Constant) -> Fraction:
    """Returns the exact value of a number as written. Raises `GrammarError` for anything else."""
    if type(node.value) not in (int, float):
        raise GrammarError("not a number")
    return Fraction(repr(node.value))


def _parse(text: str, allowed: re.Pattern[str] | None) -> ast.expr:
    text = text.strip()
    if not text or len(text) > (MAX_CHARS if allowed else MAX_LITERAL_CHARS) or _brackets(text) > MAX_BRACKETS:
        raise GrammarError("empty, too long or nested too deeply")
    if allowed is not None and (not allowed.fullmatch(text) or _LONG_NUMBER.search(text)):
        raise GrammarError("a character or a number that the grammar does not allow")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Line breaks have no meaning within brackets.
            return ast.parse(f"({text}\n)", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise GrammarError("not an expression") from error


def _brackets(text: str) -> int:
    depth = deepest = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        if depth < 0:
            raise GrammarError("a closing bracket without an opening one")
        deepest = max(deepest, depth)
    return deepest


def _checked(node: ast.expr, functions: frozenset[str]) -> ast.expr:
    """Returns the tree unchanged. Raises `GrammarError` if it holds a node that is not allowed."""
    stack: list[tuple[ast.expr, int]] = [(node, 0)]
    while stack:
        at, depth = stack.pop()
        if depth > MAX_DEPTH:
            raise GrammarError("nested too deeply")
        match at:
            case ast.Constant():
                constant(at)
            case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _BINARY):
                stack += [(left, depth + 1), (right, depth + 1)]
            case ast.UnaryOp(op=op, operand=operand) if isinstance(op, _UNARY):
                stack.append((operand, depth + 1))
            case ast.Name():
                pass
            case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in functions:
                stack.append((argument, depth + 1))
            case _:
                raise GrammarError(f"a {type(at).__name__} is not part of the grammar")
    return node


def _literal(node: ast.expr) -> Literal:
    match node:
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_literal(element) for element in elements]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Constant(value=int() | float() | str() as value) if not isinstance(value, bool):
            return value
    raise GrammarError(f"a {type(node).__name__} is not part of the grammar")


def _bounded(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator).bit_length() > MAX_BITS:
        raise GrammarError("a number is too large")
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT:
        raise GrammarError("an exponent exceeds the bounds")
    size = max(abs(base.numerator), base.denominator).bit_length()
    if size * abs(exponent) > MAX_BITS:
        raise GrammarError("a number is too large")
    return Fraction(base ** int(exponent))


def _number(terms: Polynomial) -> Fraction:
    if set(terms) - {()}:
        raise GrammarError("expected a number, found a variable")
    return terms.get((), Fraction(0))


def _without_zeros(terms: Polynomial) -> Polynomial:
    if len(terms) > MAX_TERMS:
        raise GrammarError("too many terms")
    return {monomial: _bounded(factor) for monomial, factor in terms.items() if factor}


def _scaled(terms: Polynomial, factor: Fraction) -> Polynomial:
    return _without_zeros({monomial: value * factor for monomial, value in terms.items()})


def _sum(left: Polynomial, right: Polynomial) -> Polynomial:
    return _without_zeros(left | {monomial: left.get(monomial, Fraction(0)) + right[monomial] for monomial in right})


def _product(left: Polynomial, right: Polynomial) -> Polynomial:
    if (len(left) > 1 and set(right) - {()}) or (len(right) > 1 and set(left) - {()}):
        raise GrammarError("a product that is not expanded")
    return _without_zeros({
        _joined(first, second): factor * right[second] for first, factor in left.items() for second in right
    })  # fmt: skip


def _joined(left: Monomial, right: Monomial) -> Monomial:
    exponents = dict(left)
    for name, exponent in right:
        exponents[name] = exponents.get(name, 0) + exponent
    if sum(exponents.values()) > MAX_EXPONENT:
        raise GrammarError("an exponent exceeds the bounds")
    return tuple(sorted(exponents.items()))


def _monomial_power(terms: Polynomial, exponent: Fraction) -> Polynomial:
    if exponent.denominator != 1 or not 0 <= exponent <= MAX_EXPONENT:
        raise GrammarError("an exponent exceeds the bounds")
    if exponent == 0:
        return {(): Fraction(1)}
    if len(terms) > 1 and exponent > 1:
        raise GrammarError("a power that is not expanded")
    times = int(exponent)
    if any(sum(power for _, power in monomial) * times > MAX_EXPONENT for monomial in terms):
        raise GrammarError("an exponent exceeds the bounds")
    raised = {tuple((name, power * times) for name, power in monomial): _power(factor, exponent)
              for monomial, factor in terms.items()}  # fmt: skip
    return terms if times == 1 else raised
