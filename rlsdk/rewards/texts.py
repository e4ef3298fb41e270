"""Rewards for text: exact match, similarity, required format, required language."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import numpy as np

from rlsdk.interfaces import RewardSample
from rlsdk.rewards.answer import NO_ANSWER, final_answer, has_mark, without_thoughts
from rlsdk.rewards.load import checks_rows

MAX_CHARS = 4_096
"""Of a text whose edit distance is taken; the cost is quadratic."""

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)


@checks_rows
def exact(sample: RewardSample, *, field: str | None = None, ignore_case: bool = False) -> float:
    """1 when the response's answer is one of the references, blanks at the ends and runs of blanks aside.

    Args:
        sample: its answer is what `answer_text` finds.
        field: of the row, with a text or a list of texts; None: the row's reference answer.
        ignore_case: True: capitals do not matter.

    Raises:
        ValueError: the row has no reference.
    """
    given = _spaced(answer_text(sample.response), ignore_case)
    return float(any(given == _spaced(wanted, ignore_case) for wanted in references(sample, field)))


@checks_rows
def fuzzy(
    sample: RewardSample,
    *,
    field: str | None = None,
    by: Literal["f1", "edit"] = "f1",
    threshold: float | None = None,
) -> float:
    """How similar the response's answer is to the nearest reference, from 0 to 1.

    Both are compared as SQuAD does (Rajpurkar et al. 2016, arXiv 1606.05250): without capitals, punctuation and English
    articles. `f1` is the harmonic mean of precision and recall of words, each as often as it stands; `edit` is 1 less
    the Levenshtein distance over the length of the longer text, of at most 4096 characters each.

    Args:
        sample: its answer is what `answer_text` finds.
        field: of the row, with a text or a list of texts; None: the row's reference answer.
        by: `f1` or `edit`.
        threshold: gives 1 from this similarity on and 0 below; None: the similarity itself.

    Raises:
        ValueError: the row has no reference, or `by` is neither.
    """
    if by not in ("f1", "edit"):
        raise ValueError(f"by is {by!r}; expected 'f1' or 'edit'")
    similarity = _word_f1 if by == "f1" else _edit_similarity
    given = simple_words(answer_text(sample.response))
    best = max(similarity(given, simple_words(wanted)) for wanted in references(sample, field))
    return best if threshold is None else float(best >= threshold)


def format(
    sample: RewardSample, *, tags: Sequence[str] = ("think", "answer"), opened: bool = False, only: bool = True
) -> float:
    """1 when each tag opens once and closes once, in the given order, one after the other, with something in each.

    Args:
        sample: looked at whole.
        tags: names without brackets.
        opened: True: the prompt ends with the first tag, so the response only closes it.
        only: True: nothing but blanks may stand outside of the tags.
    """
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


def language(
    sample: RewardSample,
    *,
    scripts: Sequence[str] = ("LATIN",),
    min_share: float | None = None,
    ignore_code: bool = True,
) -> float:
    """Share of the response's letters that belong to the scripts; 0 for a response without letters.

    Args:
        sample: looked at whole, thoughts included: mixing languages shows there first.
        scripts: as the names of characters begin in Unicode: `LATIN`, `CYRILLIC`, `GREEK`, `ARABIC`, `HEBREW`,
            `DEVANAGARI`, `CJK`, `HIRAGANA`, `KATAKANA`, `HANGUL`, `THAI`.
        min_share: gives 1 from this share on and 0 below; None: the share itself.
        ignore_code: True: letters in code, between back quotes, do not count.

    Raises:
        ValueError: no character's name begins with one of `scripts`.
    """
    wanted = frozenset(script.upper() for script in scripts)
    unknown = wanted - _known_scripts()
    if unknown:
        raise ValueError(f"no such script: {sorted(unknown)}; expected for instance 'LATIN', 'CYRILLIC' or 'CJK'")
    text = _CODE.sub(" ", sample.response) if ignore_code else sample.response
    letters = Counter(filter(str.isalpha, text))
    total = sum(letters.values())
    share = sum(count for letter, count in letters.items() if _script(letter) in wanted) / total if total else 0.0
    return share if min_share is None else float(share >= min_share)


def answer_text(response: str) -> str:
    """The marked answer, or else the response without its thoughts: what follows the last `</think>`, and nothing where
    a thought does not end."""
    text = without_thoughts(response)
    return (final_answer(text) or "") if has_mark(text) else text.strip()


def references(sample: RewardSample, field: str | None) -> list[str]:
    """The accepted texts.

    Raises:
        ValueError: there is none.
    """
    found = sample.answer if field is None else sample.row.get(field)
    texts = [found] if isinstance(found, str) else found
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(NO_ANSWER if field is None else f"the data row has no text or list of texts in {field!r}")
    return texts


def simple_words(text: str) -> str:
    """Without capitals, punctuation, English articles and runs of blanks."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    spaced = "".join(" " if unicodedata.category(char)[0] in "PZC" else char for char in folded)
    return " ".join(_ARTICLES.sub(" ", spaced).split())


def _spaced(text: str, ignore_case: bool) -> str:
    spaced = " ".join(unicodedata.normalize("NFC", text).split())
    return spaced.casefold() if ignore_case else spaced


def _word_f1(given: str, wanted: str) -> float:
    ours, theirs = wanted.split(), given.split()
    if not ours or not theirs:
        return float(ours == theirs)
    shared = (Counter(ours) & Counter(theirs)).total()
    return 2 * shared / (len(ours) + len(theirs))


def _edit_similarity(given: str, wanted: str) -> float:
    given, wanted = given[:MAX_CHARS], wanted[:MAX_CHARS]
    longest = max(len(given), len(wanted))
    return 1.0 - edit_distance(given, wanted) / longest if longest else 1.0


def edit_distance(one: str, other: str) -> int:
    """Levenshtein distance, a row of the table at a time. In a row, `x[j] = min(x[j], x[j-1] + 1)` is a running minimum
    of `x[j] - j`."""
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
