"""The calculator of the recipe with a tool: arithmetic and nothing else."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "examples" / "recipes" / "calculator_tool.py"
SPEC = importlib.util.spec_from_file_location("calculator_tool", FILE)
assert SPEC is not None
assert SPEC.loader is not None
TOOL = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(TOOL)


@pytest.mark.parametrize(
    ("text", "value"),
    [("12 * (3 + 4)", 84.0), ("-7/2", -3.5), (" 1 ", 1.0), ("1/0", None), ("2**99", None), ("__import__('os')", None),
     ("1+", None), ("True+1", None), ("9e15", None), ("9e14*9e14", None), ("1" * 200, None), ("(" * 90, None),
     ("", None), ("[1][0]", None), ("'a'*9", None)],
)  # fmt: skip
def test_the_tool_computes_and_evaluates_nothing(text: str, value: float | None) -> None:
    assert TOOL.evaluate(text) == value
