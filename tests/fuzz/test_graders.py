"""Whatever a model writes, a grader gives a number between 0 and 1; and 1 only for the answer."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
from conftest import FUZZ
from hypothesis import given
from hypothesis import strategies as st

from rlsdk.interfaces import RewardSample
from rlsdk.rewards import load_function

ANSWER = "7341"
MARKS = [
    "####", r"\boxed{", "}", "<answer>", "</answer>", "**", "$", "$$", "Answer:", "answer is", "\n", " ", "(", ")", "[",
    "]", "{", "\\{",
]  # fmt: skip
WORDS = [
    "12", "-3", "0.5", "1/2", "1e9", "x", "y", "+", "-", "*", "/", "^", "**", "=", "<", ",", ";", r"\frac{1}{2}",
    r"\pi", r"\sqrt{2}", r"\infty", r"\text{km}", "km", "%", r"\%", "B", "None", "__import__('os')", "eval('1')",
    "lambda: 0", "9**9**9", "\u2212", "\u0661", "\x00", "\ud7ff", "1" * 400, "(" * 50, "\\left(", "\\right)",
    "\\begin{matrix}", "&", "\\\\", "i", "inf", "nan", "True",
]  # fmt: skip
TEXTS = st.one_of(
    st.text(max_size=60), st.lists(st.sampled_from([*MARKS, *WORDS]), max_size=14).map("".join),
    st.lists(st.sampled_from(WORDS), max_size=8).map(lambda words: rf"so \boxed{{{''.join(words)}}}"),
    st.lists(st.sampled_from(WORDS), max_size=8).map(lambda words: f"so\n#### {' '.join(words)}"),
)  # fmt: skip
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "gsm8k": ("rlsdk.rewards.math.graders:gsm8k", {}),
    "math": ("rlsdk.rewards.math.symbolic:math", {}),
    "exact": ("rlsdk.rewards.text.texts:exact", {}),
    "json_schema": ("rlsdk.rewards.text.schema:json_schema", {"schema": {"type": "object", "required": ["found_it"]}}),
}
SLOW_S = 8.0
"""Less than the limit of a sample, on a machine that is busy."""


def sample(response: str, answer: str) -> RewardSample:
    return RewardSample(prompt="p", response=response, answer=answer, row={"answer": answer}, truncated=False)


@pytest.mark.parametrize("name", TARGETS)
@FUZZ
@given(response=TEXTS)
def test_any_text_is_graded_and_none_is_right_by_chance(name: str, tried: Callable[[str], None], response: str) -> None:
    tried("answers that no grader may take")
    target, options = TARGETS[name]
    grader = functools.partial(load_function(target, options), **options)
    start = time.monotonic()
    assert grader(sample(response.replace(ANSWER, ""), ANSWER)) == 0.0
    assert time.monotonic() - start < SLOW_S


@pytest.mark.parametrize("name", ["gsm8k", "math"])
@FUZZ
@given(before=TEXTS, marked=st.sampled_from(["#### {}", r"\boxed{{{}}}", "<answer>{}</answer>"]))
def test_the_answer_is_found_behind_any_text(name: str, tried: Callable[[str], None], before: str, marked: str) -> None:
    tried("right answers behind any text")
    grader = load_function(*TARGETS[name])
    assert grader(sample(f"{before}\n\n" + marked.format(ANSWER), ANSWER)) == 1.0


@FUZZ
@given(response=TEXTS)
def test_shares_are_shares(tried: Callable[[str], None], response: str) -> None:
    tried("answers that are graded in part")
    for name, options in (("fuzzy", {}), ("format", {}), ("language", {"scripts": ["Latin"]})):
        given_ = load_function(f"rlsdk.rewards.text.texts:{name}", options)(sample(response, "crane"), **options)
        assert 0.0 <= float(given_) <= 1.0
