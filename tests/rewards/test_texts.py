from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsdk.interfaces import ConfigError
from rlsdk.rewards.text.texts import answer_text, edit_distance, exact, format, fuzzy, language

from .conftest import sample


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("Paris", "Paris"),
        (" Paris \n", "Paris"),
        ("#### Paris", "Paris"),
        ("<think>London?</think>Paris", "Paris"),
        ("<think>\\boxed{London}</think>\n<answer>Paris</answer>", "Paris"),
        ("<think>Paris", ""),
        ("Paris <think>no", "Paris"),
        ("<answer>Paris", ""),
        ("", ""),
    ],
)
def test_the_text_of_an_answer_leaves_thoughts_out(response: str, answer: str) -> None:
    assert answer_text(response) == answer


def test_exact_takes_one_of_the_references_and_nothing_around_it() -> None:
    assert exact(sample("New  York", "New York")) == 1.0
    assert exact(sample("new york", "New York")) == 0.0
    assert exact(sample("new york", "New York"), ignore_case=True) == 1.0
    assert exact(sample("It is New York", "New York")) == 0.0
    assert exact(sample("b", None, row={"names": ["a", "b"]}), field="names") == 1.0
    assert exact(sample("a b", None, row={"names": ["a", "b"]}), field="names") == 0.0


# The verdicts of open-instruct's published tests of its F1 verifier.
@pytest.mark.parametrize(
    ("response", "wanted", "score"),
    [
        ("hello world", "hello world", 1.0),
        ("hello world", "hello", 2 / 3),
        ("hello world", "goodbye", 0.0),
        ("<think>Let me think...</think>hello world", "hello world", 1.0),
        ("<answer>hello world</answer>", "hello world", 1.0),
        ("hello world", ["goodbye", "hello world"], 1.0),
        ("hello world", ["hello", "world"], 2 / 3),
        ("The answer is 42!", "answer is 42", 1.0),
        ("A simple test.", "simple test", 1.0),
        ("hello\tworld\n", "Hello, World", 1.0),
        ("", "42", 0.0),
        ("hello hello hello", "hello", 0.5),
        ("a the an", "a", 1.0),
    ],
)
def test_f1_counts_words_as_often_as_they_stand(response: str, wanted: str | list[str], score: float) -> None:
    assert fuzzy(sample(response, None, row={"r": wanted}), field="r") == pytest.approx(score)


def test_the_edit_distance_is_levenshteins() -> None:
    assert edit_distance("kitten", "sitting") == 3
    assert edit_distance("", "abc") == edit_distance("abc", "") == 3
    assert edit_distance("abc", "abc") == 0
    assert fuzzy(sample("kitten", "sitting"), by="edit") == pytest.approx(1 - 3 / 7)
    assert fuzzy(sample("kitten", "sitting"), by="edit", threshold=0.5) == 1.0
    assert fuzzy(sample("kitten", "sitting"), by="edit", threshold=0.6) == 0.0
    assert fuzzy(sample("", ""), by="edit") == 1.0


@given(one=st.text(alphabet="abc", max_size=8), other=st.text(alphabet="abc", max_size=8))
def test_the_edit_distance_is_that_of_the_plain_table(one: str, other: str) -> None:
    table = [[i + j if 0 in (i, j) else 0 for j in range(len(other) + 1)] for i in range(len(one) + 1)]
    for i in range(1, len(one) + 1):
        for j in range(1, len(other) + 1):
            swap = table[i - 1][j - 1] + (one[i - 1] != other[j - 1])
            table[i][j] = min(table[i - 1][j] + 1, table[i][j - 1] + 1, swap)
    assert edit_distance(one, other) == table[-1][-1]


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("<think>a</think><answer>b</answer>", True),
        (" <think>a</think>\n\n<answer>b</answer>\n", True),
        ("<think>a</think><answer></answer>", False),
        ("<think>a</think>", False),
        ("<answer>b</answer><think>a</think>", False),
        ("<think>a<answer>b</answer></think>", False),
        ("<think>a</think><think>a</think><answer>b</answer>", False),
        ("<think>a</think><answer>b</answer><answer>c</answer>", False),
        ("<think>a</think><answer>b</answer> and more", False),
        ("so: <think>a</think><answer>b</answer>", False),
        ("<think>a</think> and <answer>b</answer>", False),
        ("</think>a<think><answer>b</answer>", False),
        ("<Think>a</Think><answer>b</answer>", False),
        ("", False),
    ],
)
def test_tags_stand_once_each_in_order_and_alone(response: str, right: bool) -> None:
    assert format(sample(response)) == right


def test_the_form_has_options() -> None:
    assert format(sample("a</think><answer>b</answer>"), opened=True) == 1.0
    assert format(sample("<think>a</think><answer>b</answer>"), opened=True) == 0.0
    assert format(sample("so <think>a</think> and <answer>b</answer>."), only=False) == 1.0
    assert format(sample("<plan>a</plan>"), tags=["plan"]) == 1.0


@pytest.mark.parametrize(
    ("response", "scripts", "share"),
    [
        ("hello", ["LATIN"], 1.0),
        ("h\u00e9llo 123 !?", ["latin"], 1.0),
        ("\u043f\u0440\u0438\u0432\u0435\u0442", ["CYRILLIC"], 1.0),
        ("ab\u4f60\u597d", ["LATIN"], 0.5),
        ("\u4f60\u597d", ["CJK"], 1.0),
        ("\u3042\u30a2\u6f22", ["CJK", "HIRAGANA", "KATAKANA"], 1.0),
        ("123", ["LATIN"], 0.0),
        ("\u0430\u0431 ```print('hello')```", ["CYRILLIC"], 1.0),
        ("\u0430\u0431 `x`", ["CYRILLIC"], 1.0),
    ],
)
def test_the_share_of_letters_of_a_script(response: str, scripts: list[str], share: float) -> None:
    assert language(sample(response), scripts=scripts) == pytest.approx(share)


def test_the_language_has_options_and_names_an_unknown_script() -> None:
    assert language(sample("ab\u4f60\u597d"), min_share=0.5) == 1.0
    assert language(sample("ab\u4f60\u597d"), min_share=0.6) == 0.0
    assert language(sample("`x` \u0430"), ignore_code=False) == 0.5
    with pytest.raises(ConfigError, match=r"scripts has unknown names.*ENGLISH"):
        language(sample("a"), scripts=["english"])


def test_rows_without_a_reference_are_an_error() -> None:
    for grade in (exact, fuzzy):
        with pytest.raises(ValueError, match="no reference answer"):
            grade(sample("a", None))
        with pytest.raises(ValueError, match="list of texts in 'names'"):
            grade(sample("a", "a"), field="names")
    with pytest.raises(ValueError, match="expected 'f1' or 'edit'"):
        fuzzy(sample("a", "a"), by="bleu")  # type: ignore[arg-type]
