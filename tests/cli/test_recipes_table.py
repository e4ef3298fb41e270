"""The table of `python -m benchmarks.recipes`: from cells that were kept, of this version of the program only; and the
pairs that two of its rows learn from."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.recipes.__main__ import ERROR, Cell, learned, markdown, read_cells
from benchmarks.recipes.rows import GREEDY, SAMPLED, rows
from benchmarks.recipes.task import PAIRS_PER_WORD, Task, more_pairs


def cell(seed: int, after: float) -> Cell:
    return Cell(
        row="grpo",
        seed=seed,
        seconds=60.0,
        cpu_seconds=20.0 + seed,
        before={SAMPLED: 0.2, GREEDY: 0.4, ERROR: 0.02},
        after={SAMPLED: after, GREEDY: 0.6, ERROR: 0.02},
    )


def test_cells_of_an_earlier_version_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--table` raised a KeyError on cells that were kept before there was a standard error."""
    kept = tmp_path / "recipes.json"
    whole, bare = asdict(cell(0, 0.5)), asdict(cell(1, 0.5))
    del bare["before"][ERROR], bare["after"][ERROR]
    early = {name: value for name, value in asdict(cell(2, 0.5)).items() if name != "cpu_seconds"}
    kept.write_text(json.dumps([whole, bare, early]))
    assert read_cells(kept) == [cell(0, 0.5)]
    assert "2 cells of an earlier version of this program are left out" in capsys.readouterr().err


def test_a_row_of_the_table_has_a_column_for_each_seed() -> None:
    row = rows()["grpo"]
    assert markdown([row], [cell(0, 0.5), cell(2, 0.25)]).splitlines() == [
        "| recipe | seed 0 | seed 2 | s of CPU |",
        "|---|---|---|---|",
        "| `grpo` | 20.0 to 50.0; 40.0 to 60.0 | 20.0 to 25.0; 40.0 to 60.0 | 20 to 22 |",
    ]
    # Three standard errors of a difference: 0.085.
    assert learned(row, cell(0, 0.3))
    assert not learned(row, cell(0, 0.28))


def test_every_word_has_pairs_with_wrong_answers_of_its_own() -> None:
    words = [a + b + c + d for a in "abc" for b in "abc" for c in "abc" for d in "abcdef"]
    rows = [{"answer": word, "chosen": word, "rejected": word[::-1] + "!"} for word in words]
    pairs = more_pairs(rows)
    assert pairs[: len(rows)] == rows
    assert len(pairs) == PAIRS_PER_WORD * len(words)
    for word in words:
        rejected = [pair["rejected"] for pair in pairs if pair["chosen"] == word]
        assert len(rejected) == PAIRS_PER_WORD
        assert word not in rejected
        assert len(set(rejected)) > 1


def test_models_of_scores_learn_from_the_pairs_and_policies_from_the_words(tmp_path: Path) -> None:
    task = Task(tmp_path)
    assert str(task.pairs) in task.flags(0, pairs=True)
    assert str(task.pairs) not in task.flags(0)
