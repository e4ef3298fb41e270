"""Rewards for text: exact match, similarity, required format, required language."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import numpy as np

from rlsdk.interfaces import ConfigError, RewardSample
from rlsdk.rewards.functions.load import checks_rows
from rlsdk.rewards.text.answer import final_answer, has_mark, no_answer, without_thoughts

MAX_CHARS = 4_096
"""Maximum length of the texts in an edit distance; the cost is quadratic."""

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)


@checks_rows
def exact(sample: RewardSample, *, field: str | None = None, ignore_case: bool = False) -> float:
    """Returns 1 if the response's answer equals one of the references, else 0.

    Leading and trailing whitespace is ignored; a run of whitespace counts as one space.

    Args:
        sample: its answer is what `answer_text` finds.
        field: field of the row with a text or a list of texts; None: the row's reference answer.
        ignore_case: compare without regard to case.

    Raises:
        ValueError: the row has no reference.
    """
    answer = _spaced(answer_text(sample.response), ignore_case)
    return float(any(answer == _spaced(reference, ignore_case) for reference in references(sample, field)))


@checks_rows
def fuzzy(
    sample: RewardSample,
    *,
    field: str | None = None,
    by: Literal["f1", "edit"] = "f1",
    threshold: float | None = None,
) -> float:
    """Returns the similarity of the response's answer to the most similar reference, from 0 to 1.

    Both are normalized as in SQuAD (Rajpurkar et al. 2016, arXiv 1606.05250): lower case, no punctuation, no English
    articles. `f1` is the harmonic mean of precision and recall over words, counted with repetition. `edit` is
    1 - Levenshtein distance / length of the longer text, over at most 4096 characters of each text.

    Args:
        sample: its answer is what `answer_text` finds.
        field: field of the row with a text or a list of texts; None: the row's reference answer.
        by: `f1` or `edit`.
        threshold: return 1 if the similarity is at least this, else 0; None: return the similarity itself.

    Raises:
        ValueError: the row has no reference.
        ConfigError: `by` is neither `f1` nor `edit`, or `threshold` is not from 0 to 1.
    """
    if by not in ("f1", "edit"):
        raise ConfigError(f"by is {by!r}: expected 'f1' or 'edit'")
    _check_share("threshold", threshold)
    similarity = _word_f1 if by == "f1" else _edit_similarity
    answer = simple_words(answer_text(sample.response))
    best = max(similarity(answer, simple_words(reference)) for reference in references(sample, field))
    return best if threshold is None else float(best >= threshold)


@checks_rows
def format(
    sample: RewardSample, *, tags: Sequence[str] = ("think", "answer"), opened: bool = False, only: bool = True
) -> float:
    """Returns 1 if each tag opens and closes exactly once, in the given order, not nested and not empty; else 0.

    Args:
        sample: its whole response is checked.
        tags: tag names without brackets.
        opened: the prompt ends with the first opening tag, so the response only closes it.
        only: allow only whitespace outside of the tags.

    Raises:
        ConfigError: there are no tags.
    """
    if not tags:
        raise ConfigError("tags is empty: expected at least one name, such as 'answer'")
    text = f"<{tags[0]}>{sample.response}" if opened and tags else sample.response
    at = 0
    for tag in tags:
        start, end = f"<{tag}>", f"</{tag}>"
        if text.count(start) != 1 or text.count(end) != 1:
            return 0.0
        begins, ends = text.index(start), text.index(end)
        inside = text[begins + len(start) : ends]
        if begins < at or ends < begins or not inside.strip() or (only and text[at:begins].strip()):
            return 0.0
        at = ends + len(end)
    return float(not (only and text[at:].strip()))


@checks_rows
def language(
    sample: RewardSample,
    *,
    scripts: Sequence[str] = ("LATIN",),
    min_share: float | None = None,
    ignore_code: bool = True,
) -> float:
    """Returns the share of the response's letters that belong to the scripts; 0 for a response without letters.

    Args:
        sample: its whole response counts, thoughts included: language mixing often starts there.
        scripts: first words of Unicode character names: `LATIN`, `CYRILLIC`, `GREEK`, `ARABIC`, `HEBREW`,
            `DEVANAGARI`, `CJK`, `HIRAGANA`, `KATAKANA`, `HANGUL`, `THAI`.
        min_share: return 1 if the share is at least this, else 0; None: return the share itself.
        ignore_code: do not count letters in code between backticks.

    Raises:
        ConfigError: there are no `scripts`, one is not the first word of any character's name, or `min_share` is not
            from 0 to 1.
    """
    _check_share("min_share", min_share)
    wanted = frozenset(script.upper() for script in scripts)
    unknown = wanted - _known_scripts()
    if unknown or not wanted:
        what = f"has unknown names {sorted(unknown)}" if unknown else "is empty"
        raise ConfigError(f"scripts {what}: expected names such as 'LATIN', 'CYRILLIC' or 'CJK'")
    text = _CODE.sub(" ", sample.response) if ignore_code else sample.response
    letters = Counter(filter(str.isalpha, text))
    total = sum(letters.values())
    share = sum(count for letter, count in letters.items() if _script(letter) in wanted) / total if total else 0.0
    return share if min_share is None else float(share >= min_share)


def _check_share(name: str, value: float | None) -> None:
    if value is not None and not 0 <= value <= 1:
        raise ConfigError(f"{name} is {value!r}: expected a number from 0 to 1, such as 0.5, or None")


def answer_text(response: str) -> str:
    """Returns the marked answer; without a mark, the response without its thoughts (`without_thoughts`), stripped."""
    text = without_thoughts(response)
    return (final_answer(text) or "") if has_mark(text) else text.strip()


def references(sample: RewardSample, field: str | None) -> list[str]:
    """Returns the reference texts.

    Raises:
        ValueError: there are none, or one is not text.
    """
    value = sample.answer if field is None else sample.row.get(field)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(no_answer() if field is None else f"the data row has no text or list of texts in {field!r}")
    return texts


def simple_words(text: str) -> str:
    """Returns the text in lower case, without punctuation and English articles, words separated by one space."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    spaced = "".join(" " if unicodedata.category(char)[0] in "PZC" else char for char in folded)
    return " ".join(_ARTICLES.sub(" ", spaced).split())


def _spaced(text: str, ignore_case: bool) -> str:
    spaced = " ".join(unicodedata.normalize("NFC", text).split())
    return spaced.casefold() if ignore_case else spaced


def _word_f1(answer: str, reference: str) -> float:
    ours, theirs = reference.split(), answer.split()
    if not ours or not theirs:
        return float(ours == theirs)
    shared = (Counter(ours) & Counter(theirs)).total()
    return 2 * shared / (len(ours) + len(theirs))


def _edit_similarity(answer: str, reference: str) -> float:
    answer, reference = answer[:MAX_CHARS], reference[:MAX_CHARS]
    longest = max(len(answer), len(reference))
    return 1.0 - edit_distance(answer, reference) / longest if longest else 1.0


def edit_distance(one: str, other: str) -> int:
    """Returns the Levenshtein distance, computed row by row.

    Within a row, `x[j] = min(x[j], x[j-1] + 1)` equals a running minimum of `x[j] - j`, plus `j`.
    """
    columns = np.arange(len(other) + 1)
    codes = np.array([ord(char) for char in other], dtype=np.int64)
    row = columns.copy()
    for char in one:
        substituted = row[:-1] + (codes != ord(char))
        next_row = np.concatenate(([row[0] + 1], np.minimum(substituted, row[1:] + 1)))
        row = np.minimum.accumulate(next_row - columns) + columns
    return int(row[-1])


@lru_cache(maxsize=1 << 16)
def _script(letter: str) -> str:
    return unicodedata.name(letter, "?").split(" ", 1)[0]


@lru_cache(maxsize=1)
def _known_scripts() -> frozenset[str]:
    return frozenset(_script(chr(code)) for code in range(0x30000) if chr(code).isalpha())
