r"""Normalizes the notation of answers: `plain` removes presentation and does not change the meaning.

Presentation means math delimiters, boxes, bold and other fonts, sizes, spacing, a final full stop, and signs that
Unicode and LaTeX write differently. Units, names, brackets and order are kept.
"""

from __future__ import annotations

import re

from rlsdk.rewards.text.answer import closing_brace

MAX_CHARS = 2_048
"""Maximum length in characters of an answer that is normalized; longer ones are compared unchanged."""

_UNICODE = str.maketrans({
    "\u2212": "-", "\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u22c5": r"\cdot ", "\u00f7": r"\div ",
    "\u03c0": r"\pi ", "\u221e": r"\infty ", "\u2264": r"\le ", "\u2265": r"\ge ", "\u2260": r"\ne ",
    "\u00b0": r"^\circ ", "\u00b2": "^2", "\u00b3": "^3", "\u222a": r"\cup ", "\u2208": r"\in ", "\u00b1": r"\pm ",
    "\u00bd": r"\frac{1}{2}", "\u00bc": r"\frac{1}{4}", "\u00be": r"\frac{3}{4}", "\u2153": r"\frac{1}{3}",
    "\u2154": r"\frac{2}{3}", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u2018": "'", "\u2019": "'",
})  # fmt: skip
_WRAPPERS = (
    r"\text", r"\textbf", r"\textit", r"\textrm", r"\textnormal", r"\mbox", r"\mathrm", r"\mathbf", r"\operatorname",
    r"\boxed", r"\fbox", r"\displaystyle", r"\textstyle",
)  # fmt: skip
_PAIRS = (("**", "**"), ("__", "__"), ("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"),
          ("`", "`"), ("*", "*"), ("_", "_"))  # fmt: skip

_EQUALS = re.compile(r"=(?!\s*[<>])")
"""Equals signs that are not part of `=>` or `=<`."""
_SIZES = re.compile(r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits)(?![a-zA-Z])\.?")
_FRACTION_NAMES = re.compile(r"\\[dtc]frac(?![a-z])")
_TEXT_NAMES = re.compile(r"\\(textbf|textit|textrm|textnormal|mbox|operatorname|mathbf|mathrm)\s*\{([^{}]*)\}")
_BOLD = re.compile(r"(?<![\w)}])\*\*(?=\S)([^*\n]+?)(?<=\S)\*\*(?![\w(])")
_CONNECTED = re.compile(
    r"(?:\s*,)?(?:\s*\\text\s*\{\s*(?:and|or)\s*,?\s*\}\s*|(?<=[^\s{])\s+(?:and|or)\s+|(?<=[0-9)}\]])(?:and|or)(?=[0-9(\\-]))"
)
_DIGIT_GAP = re.compile(r"(?<=[0-9])(?:\\!(?=[0-9])|(?:\\[,;: ]|\{,\})(?=[0-9]{3}(?![0-9])))")
_THOUSANDS = re.compile(r"(?<![\w.,])([0-9]{1,3}(?:,[0-9]{3})+)(?![0-9]|,[0-9])")
_DIGIT_LIST = re.compile(r"(?<=[0-9]), +(?=[0-9]{3}(?![0-9]))")
"""The comma between the numbers of `1, 234`, which is not 1234."""
_SPACES = re.compile(r"\\(?:quad|qquad)(?![a-zA-Z])|(?<!\\)\\[,;: ]|(?<=\S)~|\s+")
_SHORT_UPPER = re.compile(r"\\frac\s*([0-9a-zA-Z])(?![a-zA-Z])")
_SHORT_LOWER = re.compile(r"(\\frac\{[^{}]*\})\s*([0-9a-zA-Z])")
_SHORT_ROOT = re.compile(r"\\sqrt\s*([0-9a-zA-Z])")
_BLANK = re.compile(r"\s+(?=[^\w\s\\])|(?<=[^\w\s])\s+")
_BY_COMMAND = re.compile(r"(?<=[^\w\s])\s+(?=\\)|(?<=\w)\s+(?=\\(?!text))|(?<=\\)([a-zA-Z]+)\s+(?![a-zA-Z])")


def plain(text: str) -> str:
    """Normalizes the notation of an answer. A space between two letters or digits stays: `4 2` is not `42`."""
    if len(text) > MAX_CHARS:
        return text.strip()
    text = unwrap(_BOLD.sub(r"\1", text.translate(_UNICODE)))
    text = _FRACTION_NAMES.sub(r"\\frac", _SIZES.sub("", text))
    text = _TEXT_NAMES.sub(_as_text, text)
    text = _drop_math_signs(_CONNECTED.sub(", ", text))
    text = _DIGIT_GAP.sub(lambda gap: "," if "," in gap.group() and "{" in gap.group() else "", text)
    text = re.sub(r"(?<=[0-9],)\\!\s*(?=[0-9])", "", text).replace(r"\!", "").replace("{,}", ",")
    text = text.replace("<=", r"\le ").replace(">=", r"\ge ").replace("!=", r"\ne ")
    text = text.replace(r"\%", "%").replace("**", "^").replace(r"\lbrace", r"\{").replace(r"\rbrace", r"\}")
    text = re.sub(r"\^\s*\{\s*\\circ\s*\}|\\degree(?![a-z])", r"^\\circ", text)
    text = _SHORT_ROOT.sub(r"\\sqrt{\1}", _long_fractions(text))
    text = re.sub(r"_\{(\w)\}", r"_\1", _SPACES.sub(" ", text))
    if not any(bracket in text for bracket in "([{"):
        text = _DIGIT_LIST.sub(";", text)
        text = _THOUSANDS.sub(lambda number: number.group().replace(",", ""), text)
    return unwrap(_BY_COMMAND.sub(r"\1", _BLANK.sub("", text)))


def unwrap(text: str) -> str:
    """Removes what surrounds the whole text: delimiters, boxes, fonts, brackets around a single value, a full stop."""
    before = None
    while text != before:
        before = text
        text = text.strip()
        if _EQUALS.match(text) and "=" not in text[1:]:
            text = text[1:].lstrip()
        if text.endswith(".") and not text.endswith(".."):
            text = text[:-1].rstrip()
        for left, right in _PAIRS:
            inner = text[len(left) : -len(right)]
            if text.startswith(left) and text.endswith(right) and inner.strip() and left not in inner:
                text = inner.strip()
        text = _inside_command(text)
        text = _inside_brackets(text)
    return text


def top_level(text: str, separators: str) -> list[str]:
    """Splits `text` at the separators outside of all brackets.

    Brackets of different kinds close each other, for intervals such as `[0,1)`.
    """
    parts, depth, start = [], 0, 0
    for at, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char in separators and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    return [*parts, text[start:]]


def _inside_command(text: str) -> str:
    command = next((name for name in _WRAPPERS if text.startswith(name)), None)
    if command is None or re.match(r"[a-zA-Z]", text[len(command) :]):
        return text
    rest = text[len(command) :].lstrip()
    if command in (r"\displaystyle", r"\textstyle"):
        return rest
    return rest[1:-1] if rest.startswith("{") and closing_brace(rest) == len(rest) - 1 else text


def _inside_brackets(text: str) -> str:
    """`(5)` and `{5}` are 5; `(1,2)` is a pair, `{1,2}` a set."""
    if len(text) < 3 or text[0] + text[-1] not in ("()", "{}"):
        return text
    inner = text[1:-1]
    alone = min(_depths(inner), default=0) >= 0 and len(top_level(inner, ",;")) == 1
    return inner if alone and not inner.endswith("\\") else text


def _depths(text: str) -> list[int]:
    depth, depths = 0, []
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        depths.append(depth)
    return depths


def _as_text(match: re.Match[str]) -> str:
    r"""Rewrites a font command: bold text, and a single upright letter not after a number, are variables; the rest is
    `\text`."""
    font, inside = match.groups()
    behind_number = match.string[: match.start()].rstrip()[-1:].isdigit()
    is_letter = len(inside.strip()) == 1 and not behind_number
    return inside if font == "mathbf" or (font == "mathrm" and is_letter) else rf"\text{{{inside}}}"


def _drop_math_signs(text: str) -> str:
    r"""Removes dollar signs that delimit math; writes one that means money as `\$`."""
    signs = len(re.findall(r"(?<!\\)\$", text))
    if signs % 2 == 0:
        return re.sub(r"(?<!\\)\$", "", text)
    if signs == 1:
        return re.sub(r"(?<!\\)\$(?=\s?[-+]?[0-9.])|(?<=[0-9])\s*(?<!\\)\$$", r"\\$", text)
    return text


def _long_fractions(text: str) -> str:
    before = None
    while text != before:
        before = text
        text = _SHORT_LOWER.sub(r"\1{\2}", _SHORT_UPPER.sub(r"\\frac{\1}", text))
    return text
