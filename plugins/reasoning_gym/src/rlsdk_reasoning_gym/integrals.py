"""Checks whether one expression is an antiderivative of another, by automatic differentiation at many points.

Each expression is a checked syntax tree. Its value and its derivative are computed together (forward-mode automatic
differentiation, dual numbers) with 80 digits. No text or generated code is run. The time is proportional to the size of
the tree times the number of points. To pass, a wrong answer would have to agree to 20 digits at every point.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeAlias

from rlsdk_reasoning_gym.expressions import MAX_EXPONENT, GrammarError, constant, parse_algebra

DIGITS = 80
TOLERANCE = "1e-20"
"""Relative tolerance; absolute for values below 1."""
LARGEST = "1e200"
"""Maximum size of an intermediate value. Points where the integrand exceeds 1e60, or is below 1e-6, are skipped."""
MIN_POINTS = 4
POINTS = ("0.0371", "-0.0413", "0.1137", "-0.1319", "0.2113", "-0.2719", "0.4127", "-0.5231", "0.7313", "-0.8117",
          "1.3711", "-1.6199", "2.7133", "-3.1411", "5.3171", "-6.1933", "10.733", "-10.919", "11.071", "-12.113",
          "17.319", "-19.771", "23.131", "-23.717")  # fmt: skip
"""Points where integrand and derivative are compared; those where the integrand is not real are skipped."""

_CONSTANT = re.compile(r"[A-Za-z][0-9]{0,2}")

Dual: TypeAlias = tuple[Any, Any]
"""Value and derivative: mpmath numbers."""


def is_antiderivative(answer: str, integrand: str, variable: str) -> bool:
    """Whether the derivative of `answer` with respect to `variable` equals `integrand` wherever the integrand is real.

    Other names of one letter, with or without digits (`C`, `k1`), are constants; `E` and `pi` are the numbers.

    Raises:
        GrammarError: a text is not an expression of elementary functions, or exceeds the bounds.
    """
    given, wanted = (parse_algebra(text, functions()) for text in (answer, integrand))
    compared = 0
    for point in POINTS:
        target = _target(wanted, variable, point)
        if target is None:
            continue
        if not _agree(given, variable, point, target):
            return False
        compared += 1
    return compared >= MIN_POINTS


def functions() -> frozenset[str]:
    """Returns the names of the functions that the grammar knows."""
    return frozenset(_NAMES)


def _target(wanted: ast.expr, variable: str, point: str) -> Any:
    """Returns the integrand at a point; None if it is not real, too large, or too close to zero."""
    mp = _context()
    try:
        value, _ = _dual(wanted, variable, mp.mpf(point))
    except (ArithmeticError, GrammarError):
        return None
    if mp.im(value) != 0 or (value != 0 and not mp.mpf("1e-6") < abs(value) < mp.mpf("1e60")):
        return None
    return mp.re(value)


def _agree(given: ast.expr, variable: str, point: str, target: Any) -> bool:
    mp = _context()
    try:
        _, slope = _dual(given, variable, mp.mpf(point))
    except ArithmeticError:  # undefined at a point where the integrand is defined
        return False
    return bool(abs(slope - target) <= mp.mpf(TOLERANCE) * max(1, abs(target)))


def _dual(node: ast.expr, variable: str, point: Any) -> Dual:
    """Returns value and derivative of the tree.

    Raises `GrammarError` if a value exceeds the bounds, and `ArithmeticError` at a pole.
    """
    mp = _context()
    match node:
        case ast.Constant():
            number = constant(node)
            return mp.mpf(number.numerator) / number.denominator, mp.mpf(0)
        case ast.Name(id=name):
            return _named(name, variable, point)
        case ast.UnaryOp(op=op, operand=operand):
            value, slope = _dual(operand, variable, point)
            return (-value, -slope) if isinstance(op, ast.USub) else (value, slope)
        case ast.Call(func=ast.Name(id=name), args=[argument]):
            value, slope = _dual(argument, variable, point)
            outer, inner = _elementary()[_NAMES[name]]
            return _check_size(outer(value)), _check_size(inner(value) * slope) if slope != 0 else slope
        case ast.BinOp(left=left, op=op, right=right):
            return _binary(op, _dual(left, variable, point), _dual(right, variable, point))
    raise GrammarError(f"a {type(node).__name__} is not part of the grammar")


def _named(name: str, variable: str, point: Any) -> Dual:
    mp = _context()
    if name == variable:
        return point, mp.mpf(1)
    if name in ("E", "pi"):
        return (+mp.e if name == "E" else +mp.pi), mp.mpf(0)
    if not _CONSTANT.fullmatch(name):
        raise GrammarError(f"unknown name {name!r}")
    return mp.mpf(sum(map(ord, name))) / 97, mp.mpf(0)  # a constant of integration: any number works


def _binary(op: ast.operator, left: Dual, right: Dual) -> Dual:
    (a, da), (b, db) = left, right
    match op:
        case ast.Add():
            return a + b, da + db
        case ast.Sub():
            return a - b, da - db
        case ast.Mult():
            return _check_size(a * b), _check_size(da * b + a * db)
        case ast.Div():
            return _check_size(a / b), _check_size((da * b - a * db) / (b * b))
    return _power(a, da, b, db)


def _power(base: Any, slope: Any, exponent: Any, growth: Any) -> Dual:
    mp = _context()
    if abs(exponent) > MAX_EXPONENT:
        raise GrammarError("an exponent exceeds the bounds")
    if growth != 0:
        value = _check_size(mp.power(base, exponent))
        return value, _check_size(value * (growth * mp.log(base) + exponent * slope / base))
    if mp.im(exponent) == 0 and mp.isint(exponent):
        exponent = int(mp.re(exponent))
    if exponent == 0:
        return mp.mpf(1), mp.mpf(0)
    value = _check_size(mp.power(base, exponent))
    return value, _check_size(exponent * mp.power(base, exponent - 1) * slope) if slope != 0 else slope


def _check_size(value: Any) -> Any:
    if not abs(value) <= _context().mpf(LARGEST):
        raise GrammarError("a number is too large")
    return value


@cache
def _context() -> Any:
    """Returns an mpmath context of our own: other code may change the precision of the global one."""
    from mpmath import MPContext

    context = MPContext()
    context.dps = DIGITS
    return context


_NAMES: Mapping[str, str] = {
    **{name: name for name in ("exp", "log", "sqrt", "sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan",
                               "sinh", "cosh", "tanh", "asinh", "acosh", "atanh")},
    "ln": "log", "arcsin": "asin", "arccos": "acos", "arctan": "atan", "Abs": "abs", "abs": "abs",
}  # fmt: skip
"""Name as written -> name of the function in `_elementary`."""


@cache
def _elementary() -> Mapping[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]]:
    """Returns, by name, each function and its derivative."""
    mp = _context()
    one = mp.mpf(1)
    return {
        "exp": (_exp, _exp),
        "log": (mp.log, lambda u: one / u),
        "sqrt": (mp.sqrt, lambda u: one / (2 * mp.sqrt(u))),
        "sin": (_periodic(mp.sin), _periodic(mp.cos)),
        "cos": (_periodic(mp.cos), lambda u: -_periodic(mp.sin)(u)),
        "tan": (_periodic(mp.tan), lambda u: _periodic(mp.sec)(u) ** 2),
        "sec": (_periodic(mp.sec), lambda u: _periodic(mp.sec)(u) * mp.tan(u)),
        "csc": (_periodic(mp.csc), lambda u: -_periodic(mp.csc)(u) * mp.cot(u)),
        "cot": (_periodic(mp.cot), lambda u: -(_periodic(mp.csc)(u) ** 2)),
        "asin": (mp.asin, lambda u: one / mp.sqrt(1 - u * u)),
        "acos": (mp.acos, lambda u: -one / mp.sqrt(1 - u * u)),
        "atan": (mp.atan, lambda u: one / (1 + u * u)),
        "sinh": (_periodic(mp.sinh), _periodic(mp.cosh)),
        "cosh": (_periodic(mp.cosh), _periodic(mp.sinh)),
        "tanh": (_periodic(mp.tanh), lambda u: _periodic(mp.sech)(u) ** 2),
        "asinh": (mp.asinh, lambda u: one / mp.sqrt(u * u + 1)),
        "acosh": (mp.acosh, lambda u: one / (mp.sqrt(u - 1) * mp.sqrt(u + 1))),
        "atanh": (mp.atanh, lambda u: one / (1 - u * u)),
        "abs": (_absolute, lambda u: mp.sign(_real(u))),
    }


def _exp(value: Any) -> Any:
    return _periodic(_context().exp)(value)


def _periodic(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wraps a function to refuse arguments above 10,000; range reduction of a number needs as many digits as it has."""

    def bounded(value: Any) -> Any:
        if abs(value) > 10_000:
            raise GrammarError("the argument of a function is too large")
        return function(value)

    return bounded


def _absolute(value: Any) -> Any:
    return abs(_real(value))


def _real(value: Any) -> Any:
    if _context().im(value) != 0:
        raise GrammarError("the absolute value of a complex number")
    return _context().re(value)
