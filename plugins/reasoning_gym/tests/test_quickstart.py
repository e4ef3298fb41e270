"""The quickstart's rows and scores, which the core makes itself, are those of the library's task."""

from __future__ import annotations

import json

import pytest
from conftest import sample
from hypothesis import example, given
from hypothesis import strategies as st

from rlsdk.data.quickstart import LETTERS, load_quickstart
from rlsdk.rewards.text.spelling import spell_backward
from rlsdk_reasoning_gym.grader import reasoning_gym
from rlsdk_reasoning_gym.source import load_reasoning_gym

ROWS = json.loads(json.dumps(list(load_quickstart("spell_backward", size=300, seed=42))))


@pytest.mark.parametrize("seed", [0, 42, 10**9])
def test_the_rows_are_the_library_s(seed: int) -> None:
    length = {"min_word_len": LETTERS, "max_word_len": LETTERS}
    theirs = load_reasoning_gym("spell_backward", size=2000, seed=seed, **length)
    own = load_quickstart("spell_backward", size=2000, seed=seed)
    assert json.dumps(list(own)) == json.dumps(list(theirs))


@given(
    row=st.sampled_from(ROWS),
    place=st.integers(0, 6),
    letters=st.text("abcdefghijklmnopqrstuvwxyz>ABC \n#<", max_size=8),
    form=st.sampled_from(["{}", "{}{}", "#### {}", "<answer>{}</answer>", "<think>{}", "\\boxed{{{}}}", "{}>"]),
    partial=st.sampled_from([0.0, 0.5, 1.0]),
)
@example(row=ROWS[0], place=5, letters="", form="{}", partial=0.5)
@example(row=ROWS[0], place=5, letters="s", form="{}", partial=0.5)
def test_the_scores_are_the_library_s(row: dict[str, str], place: int, letters: str, form: str, partial: float) -> None:
    for answer in (row["answer"], row["answer"].lower(), row["answer"][::-1]):
        response = form.format(answer[:place] + letters, answer)
        given = sample(response, row["answer"], row["question"], row)
        assert spell_backward(given, partial=partial) == reasoning_gym(given, partial=partial)
