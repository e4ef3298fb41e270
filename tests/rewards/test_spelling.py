"""The quickstart's reward; `plugins/reasoning_gym/tests` compares it with the library's scorer."""

from __future__ import annotations

import pytest

from rlsdk.rewards.text.spelling import spell_backward

from .conftest import sample


@pytest.mark.parametrize(
    ("response", "score", "partial"),
    [
        ("ykohc", 1.0, 1.0),
        (" YKOHC\n", 1.0, 1.0),
        ("#### ykohc", 1.0, 1.0),
        ("ykoch", 0.0, 0.2 + 0.2 + 0.2),
        ("ykohcs", 0.0, 0.8),
        ("yk", 0.0, 0.4),
        ("kohc", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_letters_in_their_place_count_where_asked(response: str, score: float, partial: float) -> None:
    given = sample(response, "ykohc", "q", {"question": "Spell this word backward: choky", "answer": "ykohc"})
    assert spell_backward(given) == score
    assert spell_backward(given, partial=0.5) == (1.0 if score else 0.5 * partial)


def test_the_word_of_the_question_is_no_answer_though_it_reads_the_same_backward() -> None:
    given = sample("Anna", "annA", "q", {"question": "Spell this word backward: Anna", "answer": "annA"})
    assert spell_backward(given) == 0.0
    assert spell_backward(given, partial=0.5) == 0.5


def test_a_row_without_an_answer_cannot_be_graded() -> None:
    with pytest.raises(ValueError, match="has no reference answer"):
        spell_backward(sample("x", None))
