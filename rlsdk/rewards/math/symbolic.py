r"""Grades mathematical answers by fixed rules: first structure, then exact numbers, and algebra last."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from rlsdk.interfaces import RewardSample
from rlsdk.rewards.functions.load import checks_rows, prepared_by
from rlsdk.rewards.math.algebra import MAX_CHARS, MAX_DEPTH, depth, equal, import_math_verify, objection
from rlsdk.rewards.math.normalization import plain
from rlsdk.rewards.math.quantity import Quantity, parse_based, parse_quantity, same_unit, split_unit
from rlsdk.rewards.math.structure import Answer, Part, is_relation, read
from rlsdk.rewards.text.answer import announced, final_answer, has_mark, no_answer, parse_number, without_thoughts

_WORDS = re.compile(r"(?=.*[A-Za-z]{2})[A-Za-z][A-Za-z' -]*")
_LETTER = re.compile(r"[A-Za-z]")
_PRODUCT = re.compile(r"[A-Za-z]{2,3}")
_COMMA = re.compile(r",(?=[0-9]{3}(?![0-9]))")
_DEGREES = re.compile(r"\^\\circ(?![a-z])")

_VARIABLES = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z]+")
_LESS = re.compile(r"\\leq?(?![a-z])\s*")
_GREATER = re.compile(r"\\geq?(?![a-z])\s*")
_BETWEEN = re.compile(r"([^<≤]+)([<≤])([a-zA-Z])([<≤])([^<≤]+)")
_ABOVE = re.compile(r"([a-zA-Z])([>≥])([^>≥]+)")
_BELOW = re.compile(r"([a-zA-Z])([<≤])([^<≤]+)")

Same = Callable[[Part, Part], bool]


@checks_rows
@prepared_by(import_math_verify)
def math(sample: RewardSample, *, ordered: bool = False) -> float:
    r"""Returns 1 if the response's final answer equals the reference, else 0.

    The final answer is the text after the last `####`, in the last `\boxed{}`, or between answer tags. If the response
    is one short line without a mark, the whole line is the answer. docs/graders.md defines equality:

    - Numbers must be exact and fully evaluated (0.333333 is not 1/3, `6*7` is not 42).
    - Lists match in any order; tuples and intervals match with their brackets.
    - Units and names must agree if both sides state them.
    - Words must match letter by letter; other expressions are compared by algebra.

    An answer that only repeats a piece of the prompt, in a form other than the reference's, scores 0.

    Args:
        sample: its reference answer may be a worked solution with a mark.
        ordered: require the elements of a list in the reference's order.

    Raises:
        ValueError: the data row has no reference answer.
    """
    if not sample.answer:
        raise ValueError(no_answer())
    given = _candidate(sample.response)
    if not given:
        return 0.0
    wanted, exact, has_list_comma = _reference(sample.answer)
    number = None if exact is None or "$" in given else parse_number(given)
    if exact is not None and number is not None:  # fast path: most answers are plain numbers
        return float(exact.value == number)
    if has_list_comma and plain(_COMMA.sub(", ", given)) == wanted:  # `1,234` for the list `1, 234`
        return 1.0
    given = plain(given)
    if given == wanted:
        return float(bool(given))
    if exact is None and len(given) > 2 and _without_spaces(given) in _without_spaces(sample.prompt):
        return 0.0
    return float(same_answer(wanted, given, ordered=ordered))


def same_answer(wanted: str, given: str, *, ordered: bool = False) -> bool:
    """Whether two answers normalized by `plain` have the same kind and equal parts."""
    if len(given) > max(MAX_CHARS, len(wanted)) or depth(given) > max(MAX_DEPTH, depth(wanted)):
        return False
    expected, found = read(wanted), read(given)
    if expected is None or found is None:
        return False
    if expected.in_order != found.in_order:
        ours, theirs = _as_interval(wanted) or wanted, _as_interval(given) or given
        return (ours, theirs) != (wanted, given) and same_answer(ours, theirs, ordered=ordered)
    if expected.brackets != found.brackets and expected.in_order:
        return False
    if expected.name and found.name and expected.name != found.name:
        return False
    if len(expected.parts) != len(found.parts) or (len(expected.parts) == 1 and expected.brackets != found.brackets):
        return False

    def same(one: Part, other: Part) -> bool:
        return same_part(one, other, wanted)

    if ordered or _keeps_order(expected, found):
        return all(map(same, expected.parts, found.parts))
    return _match(expected.parts, found.parts, same)


def same_part(wanted: Part, given: Part, whole: str) -> bool:
    """Whether two parts of an answer are equal. If only one has a name, the name is ignored, unless the other one is a
    relation."""
    if wanted.name and given.name and wanted.name != given.name:
        return (wanted.name, wanted.text) == (given.text, given.name)
    if (wanted.name and not given.name and is_relation(given.text)) or (
        given.name and not wanted.name and is_relation(wanted.text)
    ):
        return _by_algebra(wanted.whole, given.whole, whole)
    return same_value(wanted.text, given.text, whole)


def same_value(wanted: str, given: str, whole: str) -> bool:
    """Whether two values are equal: as quantities, as numbers in a stated base, as words, or by algebra."""
    if wanted == given:
        return bool(wanted)
    if _is_bracketed(wanted) or _is_bracketed(given):
        return same_answer(wanted, given)
    expected, found = parse_quantity(wanted), parse_quantity(given)
    if expected is not None:
        return found is not None and expected.same(found)
    based = parse_based(wanted)
    if based is not None or parse_based(given) is not None:
        return based == parse_based(given)
    (wanted, unit), (given, given_unit) = split_unit(wanted), split_unit(given)
    if not same_unit(unit, given_unit):
        return False
    if wanted == given:
        return bool(wanted)
    verdict = _as_words(wanted, given)
    return _by_algebra(wanted, given, whole) if verdict is None else verdict


def _as_words(wanted: str, given: str) -> bool | None:
    """Compares words letter by letter, without regard to case; a reference in capitals (`AB`) only matches itself.

    Different single letters are not equal. None if the texts cannot be compared as words: `xy` may also be a product.
    """
    if _LETTER.fullmatch(wanted) and _LETTER.fullmatch(given):
        return False
    if _WORDS.fullmatch(wanted) is None:
        return None
    if _WORDS.fullmatch(given) is None:
        return None if _PRODUCT.fullmatch(wanted) else False
    return False if wanted.isupper() else wanted.casefold() == given.casefold()


def _by_algebra(wanted: str, given: str, whole: str) -> bool:
    wanted, given = _DEGREES.sub("", wanted), _DEGREES.sub("", given)
    if is_relation(wanted) != is_relation(given):  # math-verify would use the right side of an equation
        return False
    if ":" in wanted + given or _mixes_cases(f"{wanted} {given}") or objection(given, f"{wanted} {whole}") is not None:
        return False
    return equal(wanted, given)


def _mixes_cases(text: str) -> bool:
    """Whether a letter occurs both in upper and in lower case: math-verify treats `n` and `N` as the same."""
    letters = set("".join(_VARIABLES.findall(text)))
    return any(letter.swapcase() in letters for letter in letters)


def _keeps_order(expected: Answer, found: Answer) -> bool:
    """Whether order matters: in tuples and intervals, in lists of words or letters (rankings), and in values that only
    one side names."""
    if expected.in_order:
        return True
    if expected.brackets == "" and all(_is_word(part.text) for part in expected.parts):
        return True
    several = len(expected.names) > 1 or len(found.names) > 1
    return several and not (expected.names and found.names)


def _is_bracketed(text: str) -> bool:
    answer = read(text) if text.startswith(("(", "[", "{", r"\{")) else None
    return answer is not None and bool(answer.brackets)


def _is_word(text: str) -> bool:
    return (_LETTER.fullmatch(text) or _WORDS.fullmatch(text)) is not None


def _match(wanted: tuple[Part, ...], given: tuple[Part, ...], same: Same) -> bool:
    """Whether every wanted part matches a different given part."""
    left = list(given)
    for part in wanted:
        index = next((at for at, other in enumerate(left) if same(part, other)), None)
        if index is None:
            return False
        del left[index]
    return True


def _as_interval(text: str) -> str | None:
    r"""Converts inequalities in one variable to an interval: `-2\le x<7` to `[-2,7)`, `x>5` to `(5,\infty)`.

    None for other texts.
    """
    text = _GREATER.sub("≥", _LESS.sub("≤", text))
    between, above, below = (form.fullmatch(text) for form in (_BETWEEN, _ABOVE, _BELOW))
    if between:
        low, first, _, second, high = between.groups()
        return f"{'[' if first == '≤' else '('}{low},{high}{']' if second == '≤' else ')'}"
    if above:
        return rf"{'[' if above.group(2) == '≥' else '('}{above.group(3)},\infty)"
    return rf"(-\infty,{below.group(3)}{']' if below.group(2) == '≤' else ')'}" if below else None


@lru_cache(maxsize=8192)
def _reference(answer: str) -> tuple[str, Quantity | None, bool]:
    """Returns the normalized answer of a reference, its value if it is a quantity, and whether it has a list comma.

    A list comma is the one in `1, 234`, where `1,234` would be a number; `plain` writes it as a semicolon.
    """
    written = final_answer(answer) or answer
    wanted = plain(written)
    return wanted, parse_quantity(wanted), ";" in wanted and ";" not in written.replace(r"\;", "")


def _candidate(response: str) -> str | None:
    """Returns the marked answer, or the whole response if it is one short line; else None."""
    if has_mark(response):
        marked = final_answer(response)
        return announced(marked) if marked else None
    bare = without_thoughts(response).strip()
    return bare if bare and "\n" not in bare and len(bare) <= MAX_CHARS else None


def _without_spaces(text: str) -> str:
    return re.sub(r"\s+", "", text)
