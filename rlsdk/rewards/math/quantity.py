"""Quantities: exact numbers with units, and their comparison.

A number must be fully evaluated: `6*7` and `84/2` are not 42, `2/6` is not 1/3. It is an integer, a decimal, a fraction
in lowest terms, a mixed number or a power of ten, and its value is exact. If both sides name a unit, the units must be
the same; a unit that only one side names is ignored. Units are not converted: 1 km is not 1000 m, and 50% is not 0.5.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from math import gcd

from rlsdk.rewards.text.answer import parse_number

MAX_CHARS = 96
MAX_EXPONENT = 400
"""Maximum exponent of ten; it bounds the number of digits of a value."""

_FRACTION = re.compile(r"([+-]?)(?:([+-]?[0-9]+)/([+-]?[0-9]+)|\\frac\{([+-]?[0-9]+)\}\{([+-]?[0-9]+)\})")
_MIXED = re.compile(r"([+-]?)([0-9]+)(?: ([0-9]+)/([0-9]+)|\\frac\{([0-9]+)\}\{([0-9]+)\})")
_POWER = re.compile(r"(?:(.+?)(?:\\times|\\cdot|\*)|([+-]?))10\^(?:\{([+-]?[0-9]{1,4})\}|([+-]?[0-9]{1,4}))")
_SCIENTIFIC = re.compile(r"([+-]?[0-9]+(?:\.[0-9]+)?)[eE]([+-]?[0-9]{1,4})")
_BASED = re.compile(r"(-?)0*([0-9A-Z]+)_(?:\{\(?([a-z]+|[0-9]+)\)?\}|([0-9]+))")
_BASES = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9",
          "ten": "10", "twelve": "12", "sixteen": "16"}  # fmt: skip

_CURRENCY = {
    r"\$": "dollar",
    "$": "dollar",
    r"US\$": "dollar",
    "US$": "dollar",
    "\u20ac": "euro",
    "\u00a3": "gbp",
    "\u00a5": "yen",
    "\u20b9": "rupee",
}
_IN_FRONT = re.compile(r"([+-]?)(\\?\$|[\u20ac\u00a3\u00a5\u20b9]|US\\?\$)\s?(.+)", re.DOTALL)
_BEHIND = re.compile(r"(.*[^\s\\])\s*(\\?\$|[\u20ac\u00a3\u00a5\u20b9]|%|\^\\circ)", re.DOTALL)
_DEGREES_OF = re.compile(r"(.*\S)\s*\^\\circ\s*(?:\\text\{\s*([CF])\s*\}|([CF]))", re.DOTALL)
_TEXT = re.compile(r"(.*[^\s\\])\s*\\text\{([^{}]*)\}(?:\^(?:\{([23])\}|([23])))?", re.DOTALL)
_WORDS = re.compile(r"(.*?[0-9}])(\s*)([A-Za-z]+\.?(?:[ /-][A-Za-z]+){0,3})(?:\^(?:\{([23])\}|([23])))?")
_NOT_UNITS = frozenset({
    "a", "about", "an", "and", "are", "billion", "but", "dozen", "e", "exp", "half", "hundred", "hundreds", "if", "inf",
    "infinity", "is", "just", "k", "log", "maybe", "million", "millions", "mod", "nan", "no", "not", "nothing", "or",
    "pi", "plus", "minus", "probably", "sin", "cos", "tan", "sqrt", "than", "that", "the", "then", "thousand",
    "thousands", "to", "trillion", "twice", "was", "zero", "one", "two", "three", "four", "five", "six", "seven",
    "eight", "nine", "ten", "th", "st", "nd", "rd", "x", "times", "squared", "cubed", "wrong", "incorrect",
})  # fmt: skip
"""Words after a number that are not units: they change it, doubt it, or are part of an expression."""
_LETTER_UNITS = frozenset("mgshlLNJWVAK")
_ALIASES = {
    "$": "dollar", "usd": "dollar", "buck": "dollar", "eur": "euro", "cents": "cent",
    "percent": "%", "pct": "%", "percentage": "%", "percents": "%", "deg": "degree", "degrees": "degree",
    "m": "meter", "metre": "meter", "km": "kilometer", "kilometre": "kilometer", "cm": "centimeter",
    "centimetre": "centimeter", "mm": "millimeter", "millimetre": "millimeter", "in": "inch", "inches": "inch",
    "ft": "foot", "feet": "foot", "yd": "yard", "mi": "mile", "g": "gram", "kg": "kilogram", "mg": "milligram",
    "lb": "pound", "lbs": "pound", "oz": "ounce", "l": "liter", "L": "liter", "litre": "liter", "ml": "milliliter",
    "mL": "milliliter", "s": "second", "sec": "second", "secs": "second", "min": "minute", "mins": "minute",
    "h": "hour", "hr": "hour", "hrs": "hour", "N": "newton", "J": "joule", "W": "watt", "V": "volt", "K": "kelvin",
    "mph": "mile/hour", "kph": "kilometer/hour", "sq": "square", "cu": "cubic", "people": "person", "men": "man",
    "women": "woman", "children": "child", "mice": "mouse", "geese": "goose", "teeth": "tooth",
}  # fmt: skip
_POWERS = {"square": "2", "cubic": "3"}


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A number with its unit."""

    value: Fraction
    unit: str | None = None
    """Normalized; None if no unit is named."""

    def same(self, other: Quantity) -> bool:
        """Whether the values are equal and the units agree (`same_unit`)."""
        return self.value == other.value and same_unit(self.unit, other.unit)


def same_unit(one: str | None, other: str | None) -> bool:
    """Whether two units are the same, or at least one is not named."""
    return one is None or other is None or one == other


def parse_quantity(text: str) -> Quantity | None:
    """Returns the quantity in an answer normalized by `plain`; None if it is anything else."""
    if len(text) > MAX_CHARS:
        return None
    value = parse_value(text)
    if value is not None:
        return Quantity(value=value)
    rest, unit = split_unit(text)
    value = None if unit is None else parse_value(rest)
    return None if value is None else Quantity(value=value, unit=unit)


def parse_value(text: str) -> Fraction | None:
    r"""Returns the exact value of a fully evaluated number as `plain` writes it; None for anything else.

    Examples: `1,234.5`, `-2/3`, `\frac{1}{-3}`, `1\frac{2}{3}`, `4 4/9`, `1e3`, `10^4`, `1.5\times10^{-3}`.
    """
    if len(text) > MAX_CHARS:
        return None
    number = None if "$" in text else parse_number(text)
    if number is not None:
        return number
    for read in (_fraction, _mixed, _power_of_ten):
        number = read(text)
        if number is not None:
            return number
    return None


def parse_based(text: str) -> tuple[str, str, str] | None:
    """Returns sign, digits and base of a number in a stated base (`1001_2`), or None. Does not evaluate the digits."""
    text = re.sub(r"\\text\{\s*([^{}]*?)\s*\}", r"{\1}", text) if r"\text" in text else text
    match = _BASED.fullmatch(text.replace("{{", "{").replace("}}", "}"))
    if match is None:
        return None
    sign, digits, named, plain_base = match.groups()
    base = plain_base or _BASES.get(named, named)
    return (sign, digits, base) if base.isdigit() else None


def split_unit(text: str) -> tuple[str, str | None]:
    """Returns an answer without its unit, and the normalized unit or None.

    For two different units, as in `$5%`, it returns the unchanged text and None.
    """
    front = _IN_FRONT.fullmatch(text)
    body = f"{front.group(1)}{front.group(3)}" if front else text
    rest, unit = _split_behind(body)
    if front is None:
        return rest, unit
    money = _CURRENCY[front.group(2)]
    return (rest, money) if unit in (None, money) else (text, None)


def _split_behind(text: str) -> tuple[str, str | None]:
    match = _DEGREES_OF.fullmatch(text)
    if match:
        return match.group(1), f"degree {match.group(2) or match.group(3)}"
    match = _BEHIND.fullmatch(text)
    if match:
        sign = match.group(2)
        return match.group(1), _CURRENCY.get(sign) or {"%": "%"}.get(sign, "degree")
    match = _TEXT.fullmatch(text)
    if match:
        unit = _one_spelling(match.group(2), match.group(3) or match.group(4))
        return (match.group(1), unit) if unit else (text, None)
    match = _WORDS.fullmatch(text) if len(text) <= MAX_CHARS else None
    if match and _is_unit(match.group(3), spaced=bool(match.group(2))) and parse_value(match.group(1)) is not None:
        unit = _one_spelling(match.group(3), match.group(4) or match.group(5))
        return (match.group(1), unit) if unit else (text, None)
    return text, None


def _is_unit(words: str, *, spaced: bool) -> bool:
    """Whether words after a number are a unit, not a variable: `5 m` and `5cm` have units, `5x` is a product."""
    first = re.split(r"[ ./-]", words)[0]
    return (spaced and first in _LETTER_UNITS) if len(first) == 1 else (spaced or first in _ALIASES)


def _one_spelling(words: str, power: str | None) -> str | None:
    """Normalizes a unit: `square meters`, `m^2` and `sq. m` give the same text. None for words that are not a unit."""
    named = re.findall(r"[A-Za-z%$]+|/|\^\{?[23]", words.replace(r"\$", "$").replace(r"\%", "%"))
    if not named or len(named) > 6 or any(word.lower() in _NOT_UNITS for word in named):
        return None
    if re.search(r"[^A-Za-z%$/^23{}.\s-]", words):
        return None
    spelt: list[str] = []
    next_power = ""
    for word in named:
        if word.lower().rstrip("s") in _POWERS or _ALIASES.get(word.lower()) in _POWERS:
            next_power = _POWERS[_ALIASES.get(word.lower(), word.lower())]
        elif word.startswith("^"):
            spelt[-1:] = [f"{spelt[-1]}^{word[-1]}"] if spelt else []
        else:
            spelt.append(_singular(word) + (f"^{next_power}" if next_power else ""))
            next_power = ""
    if power and spelt:
        spelt[-1] += f"^{power}"
    return " ".join(spelt).replace(" per ", "/").replace(" / ", "/") or None


def _singular(word: str) -> str:
    if word in _ALIASES:
        return _ALIASES[word]
    word = word.lower()
    if word not in _ALIASES and word.endswith("s") and not word.endswith("ss"):
        word = word[:-1]
    return _ALIASES.get(word, word)


def _fraction(text: str) -> Fraction | None:
    match = _FRACTION.fullmatch(text)
    if match is None:
        return None
    sign, top, bottom, upper, lower = match.groups()
    numerator, denominator = int(top or upper), int(bottom or lower)
    minus = (sign == "-") + (numerator < 0) + (denominator < 0)
    if denominator == 0 or gcd(numerator, denominator) != 1 or minus > 1:
        return None
    value = Fraction(abs(numerator), abs(denominator))
    return -value if minus else value


def _mixed(text: str) -> Fraction | None:
    match = _MIXED.fullmatch(text)
    if match is None:
        return None
    sign, whole, top, bottom, upper, lower = match.groups()
    numerator, denominator = int(top or upper), int(bottom or lower)
    if not 0 < numerator < denominator or gcd(numerator, denominator) != 1:
        return None
    value = int(whole) + Fraction(numerator, denominator)
    return -value if sign == "-" else value


def _power_of_ten(text: str) -> Fraction | None:
    match = _SCIENTIFIC.fullmatch(text)
    if match:
        factor, exponent = parse_number(match.group(1)), int(match.group(2))
    else:
        match = _POWER.fullmatch(text)
        if match is None:
            return None
        factor = parse_number(match.group(1) or f"{match.group(2)}1")
        exponent = int(match.group(3) or match.group(4))
    if factor is None or abs(exponent) > MAX_EXPONENT:
        return None
    return factor * Fraction(10) ** exponent
