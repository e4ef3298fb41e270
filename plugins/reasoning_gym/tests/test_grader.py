"""reasoning-gym: every task that is quick to make, and what its own scorer lets through."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from conftest import sample

from rlsdk.interfaces import RewardSample
from rlsdk_reasoning_gym import grader as tasks
from rlsdk_reasoning_gym.grader import reasoning_gym
from rlsdk_reasoning_gym.source import load_reasoning_gym

QUICK = [
    "chain_sum", "basic_arithmetic", "products", "gcd", "lcm", "count_bits", "letter_counting", "spell_backward",
    "number_sorting", "word_sorting", "game_of_life_halting", "gsm_symbolic", "knights_knaves", "letter_jumble",
    "polynomial_equations", "sokoban", "kakurasu", "futoshiki", "sudoku", "modulo_grid", "fraction_simplification",
    "prime_factorization", "simple_equations", "base_conversion", "caesar_cipher", "complex_arithmetic",
]  # fmt: skip
"""Those named in the README of reasoning-gym's pitfalls, and all whose scorer calls prose right."""


def items(task: str, **parameters: Any) -> list[Mapping[str, Any]]:
    rows = load_reasoning_gym(task, size=4, seed=7, **parameters)
    return [json.loads(json.dumps(row)) for row in rows]  # as a grading process gets them


def grade(response: str, row: Mapping[str, Any], **options: Any) -> float:
    return reasoning_gym(sample(response, row["answer"], row["question"], row), **options)


@pytest.mark.parametrize("task", QUICK)
def test_the_reference_is_right_and_text_around_it_is_not(task: str) -> None:
    for row in items(task):
        answer, question = row["answer"], row["question"]
        assert grade(answer, row) == grade(f"<think>x</think><answer>{answer}</answer>", row) == 1.0
        for response in (
            f"The answer is {answer}", f"{answer} or maybe not", question, f"{question} {answer}", f"{answer} {answer}",
            f"<answer>It is {answer}</answer>", f"<answer>{answer}", "banana", "?", "",
        ):  # fmt: skip
            assert grade(response, row) == 0.0, (task, response)


def test_another_answer_is_right_where_the_task_has_several() -> None:
    row = items("graph_color")[0]
    assert row["answer"] is None
    coloring = json.dumps(row["metadata"]["possible_answer"])
    assert grade(coloring, row) == 1.0
    assert grade(coloring.replace("1", "9"), row) == 0.0
    assert grade(f"Here: {coloring}", row) == 0.0
    cube = items("rubiks_cube")[0]
    assert grade(cube["metadata"]["example_correct_answer"], cube) == 1.0


def test_a_scorer_is_asked_once_whether_it_finds_anything_right(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()
    score = tasks._score

    def count(given: str, of: RewardSample) -> float:
        asked.append(given)
        return score(given, of)

    monkeypatch.setattr(tasks, "_score", count)
    assert grade("whatever", items("game_of_life_halting")[0], partial=0.5) == 0.0
    assert asked == ["whatever", tasks.PROBE]


def test_numbers_are_compared_as_numbers() -> None:
    row = {"question": "?", "answer": "1000", "metadata": {"source_dataset": "chain_sum"}}
    assert grade("1,000", row) == grade("1000.0", row) == grade("+1000", row) == 1.0
    assert grade("1e3", row) == grade("1000 ", row) - 1 == grade("10 00", row) == 0.0


def test_partial_credit_is_given_only_when_asked_for() -> None:
    row = next(row for row in items("spell_backward") if len(set(row["answer"])) > 2)
    nearly = row["answer"][:-1] + "?"
    assert grade(nearly, row) == 0.0
    assert 0.0 < grade(nearly, row, partial=0.5) < 0.5
    assert grade(row["answer"], row, partial=0.5) == 1.0
    assert grade(nearly, row, exact=False) == pytest.approx(2 * grade(nearly, row, partial=0.5))


def test_what_would_keep_a_scorer_busy_is_never_handed_to_it() -> None:
    for task, response in (
        ("fraction_simplification", "1" * 100_000), ("coin_flip", "1e999999999"), ("rubiks_cube", "R999999999"),
        ("rush_hour", "A+999999999"), ("propositional_logic", "(" * 8000 + "A" + ")" * 8000),
    ):  # fmt: skip
        assert grade(response, items(task)[0], exact=False) == 0.0


def test_a_row_of_another_origin_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no metadata.source_dataset"):
        grade("a", {"question": "?", "answer": "b", "metadata": {}})
    with pytest.raises(ValueError, match="has no task 'nothing'"):
        grade("a", {"question": "?", "answer": "b", "metadata": {"source_dataset": "nothing"}})
