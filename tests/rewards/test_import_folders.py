"""Which folders a grading process imports from."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlsdk.rewards import RewardDef, RewardRunner

from .conftest import sample

INSTALLED = ("json", "torch", "numpy", "sympy", "math_verify", "rlsdk")
MISSING = ("sitecustomize", "msvcrt", "gmpy2", "flint")
"""Names that Python or a library of a grader would import if they were there."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, full of traps, where the variable names it to Python."""
    for name in (*INSTALLED, *MISSING):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a module of the current folder')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", ":")
    return tmp_path


def score(target: str) -> float:
    runner = RewardRunner([RewardDef(name="it", target=target)])
    try:
        return float(runner.score([sample("\\boxed{42}")]).scores[0])
    finally:
        runner.close()


def test_a_grader_imports_nothing_from_the_current_folder(here: Path) -> None:
    assert score("rlsdk.rewards.math.symbolic:math") == 1.0


def test_it_imports_nothing_installed_from_there_even_where_the_program_itself_does(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in MISSING:
        (here / f"{name}.py").unlink()
    monkeypatch.syspath_prepend("")
    assert score("rlsdk.rewards.math.symbolic:math") == 1.0


@pytest.mark.parametrize("target", ["mine:fn", "mine.py:fn"])
def test_a_user_s_reward_there_works_and_so_does_what_it_imports(target: str, here: Path) -> None:
    (here / "mine.py").write_text("import json, beside\ndef fn(sample): return beside.SCORE\n")
    for name in MISSING:
        (here / f"{name}.py").unlink()
    (here / "beside.py").write_text("SCORE = 0.5\n")
    assert score(target) == 0.5
    assert "mine" not in sys.modules
