"""The table of answers and verdicts: from the issue tracker, from the tests of peers' graders, and our own.

`source` says where a row comes from; `source_says` is there where its verdict is not ours, on purpose.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlsdk.rewards.math.graders import choice, gsm8k
from rlsdk.rewards.math.symbolic import math

from .conftest import sample

CASES = Path(__file__).parent / "cases"


def rows(name: str) -> list[Any]:
    lines = (CASES / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [pytest.param(json.loads(line), id=f"{name}-{at}") for at, line in enumerate(lines, 1)]


def test_the_table_is_large_and_has_more_wrong_answers_than_any_peer_lists() -> None:
    table = [param.values[0] for name in ("math", "gsm8k", "choice") for param in rows(name)]
    keys = [(row["reference"], row.get("answer", row.get("response")), "answer" in row) for row in table]
    assert len(set(keys)) >= 800 - 10
    assert sum(not row["right"] for row in table) >= 350
    assert sum("own" not in row["source"] for row in table) >= 250


@pytest.mark.parametrize("row", rows("math"))
def test_math(row: dict[str, Any]) -> None:
    boxed, line = rf"so \boxed{{{row['answer']}}}.", f"#### {row['answer']}\nas I said"
    assert math(sample(boxed, row["reference"], "?")) == math(sample(line, row["reference"], "?")) == row["right"]


@pytest.mark.parametrize("row", rows("gsm8k"))
def test_gsm8k(row: dict[str, Any]) -> None:
    assert gsm8k(sample(row["response"], row["reference"])) == row["right"]


@pytest.mark.parametrize("row", rows("choice"))
def test_choice(row: dict[str, Any]) -> None:
    assert choice(sample(row["response"], row["reference"])) == row["right"]
