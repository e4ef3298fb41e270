from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsdk.data import DataRow, PromptFormat, distinct, drop_seen, question_key, split_by_content
from rlsdk.interfaces import ConfigError, DataError

from .conftest import rows_of

QUESTIONS = st.lists(st.sampled_from([f"what is {n}?" for n in range(12)]), min_size=2, max_size=40)


def questions(rows: list[DataRow]) -> list[object]:
    return [row.row["question"] for row in rows]


@given(texts=QUESTIONS, share=st.floats(0, 0.9), seed=st.integers(0, 5))
def test_no_question_stands_in_both_parts_and_none_is_lost(texts: list[str], share: float, seed: int) -> None:
    rows = rows_of(*({"question": text} for text in texts))
    try:
        train, held = split_by_content(rows, eval_fraction=share, seed=seed)
    except DataError:
        return  # all distinct questions fell to one side
    assert not set(questions(train)) & set(questions(held))
    assert set(questions(train)) | set(questions(held)) == set(texts)
    assert len(set(questions(held))) == len(held)
    assert len(train) == sum(text in set(questions(train)) for text in texts)


@given(texts=QUESTIONS, seed=st.integers(0, 5))
def test_a_number_of_distinct_questions_is_held_out(texts: list[str], seed: int) -> None:
    rows = rows_of(*({"question": text} for text in texts))
    wanted = len(set(texts)) - 1
    train, held = split_by_content(rows, num_eval=wanted, seed=seed)
    assert len(held) == wanted
    assert len(set(questions(train))) == 1


@given(texts=QUESTIONS, more=QUESTIONS)
def test_a_question_keeps_its_side_when_rows_are_added(texts: list[str], more: list[str]) -> None:
    def held(part: list[str]) -> set[object]:
        rows = rows_of(*({"question": text} for text in [*part, "always here"]))
        return set(questions(split_by_content(rows, eval_fraction=0.4, seed=EVEN_SEED)[1]))

    assert held(texts) == held(texts + more) & set(texts)


EVEN_SEED = 1
"""With which "always here" falls to train, so that no split is without train rows."""


def test_runs_of_blanks_make_no_other_question() -> None:
    rows = rows_of({"question": "a  b\n"}, {"question": "a b"}, {"question": "c"})
    train, held = split_by_content(rows, num_eval=1)
    assert {question_key(row) for row in PromptFormat().select(train)} in ({"a b"}, {"c"})
    assert len(held) == 1


def test_generated_tasks_that_repeat_questions_are_cut_clean() -> None:
    draw = Random(0)
    rows = rows_of(*({"question": f"{draw.randint(0, 9)} * {draw.randint(0, 9)}?"} for _ in range(300)))
    assert len(distinct(rows)) < 100
    train, held = split_by_content(rows, num_eval=20)
    assert len(held) == 20
    assert not set(questions(train)) & set(questions(held))


def test_questions_of_a_second_data_set_leave_the_first() -> None:
    rows = rows_of({"question": "a"}, {"question": "b "}, {"question": "a"}, {"question": "c"})
    kept, dropped = drop_seen(rows, rows_of({"question": "b"}, {"question": "c"}))
    assert questions(kept) == ["a", "a"]
    assert dropped == 2


def test_impossible_splits_are_refused() -> None:
    rows = rows_of({"question": "a"}, {"question": "a"}, {"question": "b"})
    with pytest.raises(DataError, match=r"cannot hold out 2 .* 3 rows with 2 distinct questions"):
        split_by_content(rows, num_eval=2)
    with pytest.raises(ConfigError, match="give one of eval_fraction"):
        split_by_content(rows)
    with pytest.raises(ConfigError, match=r"eval_fraction is 1.5; expected 0 to 1"):
        split_by_content(rows, eval_fraction=1.5)
