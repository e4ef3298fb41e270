"""The basic requirements of a suite: which they are, and that a run of them says what it left out."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rlsdk.interfaces import ConfigError
from rlsdk.testing import RolloutConformance, TrainConformance
from rlsdk.testing.check import check_backend
from rlsdk.testing.suites.report import Outcome, from_json
from rlsdk.testing.suites.requirements import MARK

TESTS = """
from rlsdk.testing import TrainConformance, requirement

class TestTorch(TrainConformance):
    backend = "torch"

class TestSame(TestTorch):
    @requirement("mine", basic=True)
    def test_mine(self):
        "Is basic because its author says so."

class TestOther(TrainConformance):
    backend = "another"
    test_registration_usable = None

def test_plain():
    pass
"""


def requirements(suite: type[Any]) -> dict[str, bool]:
    """Requirement -> whether it is basic."""
    tests = [getattr(suite, name) for name in dir(suite) if name.startswith("test_")]
    marks = [mark for test in tests for mark in test.pytestmark if mark.name == MARK]
    return {mark.args[0]: mark.kwargs["basic"] for mark in marks}


@pytest.mark.parametrize(
    ("suite", "families"),
    [
        (
            RolloutConformance,
            "registration close forecast sleep abort pause continue event_loop update layout log_probs distribution "
            "greedy seed stop_tokens stop_strings batch_invariance unmeasured",
        ),
        (
            TrainConformance,
            "registration close forecast offload outputs gradient step checkpoint export layout frozen model ranks "
            "parallel random_state isolation unmeasured",
        ),
    ],
)
def test_basic_requirements_are_few_and_of_every_family(suite: type[Any], families: str) -> None:
    found = requirements(suite)
    basic = [name for name, is_basic in found.items() if is_basic]
    measured = [name for name in basic if not name.startswith("unmeasured.")]
    assert 40 <= len(measured) <= 52
    assert len(found) > 2.5 * len(basic)
    assert {name.partition(".")[0] for name in basic} >= set(families.split())
    # What is claimed and not measured passes nowhere, and what reads options is not among the inputs of a suite.
    assert [name for name in found if name.startswith(("unmeasured.", "registration.")) and name not in basic] == []


def test_a_run_of_the_basic_ones_says_of_each_suite_how_many_it_left_out(tmp_path: Path) -> None:
    (tmp_path / "test_parts.py").write_text(TESTS)
    command = [
        sys.executable, "-m", "pytest", "test_parts.py", "-c", os.devnull, "--rootdir", str(tmp_path), "-q",
        "-p", "rlsdk.testing.plugin", "-p", "no:cacheprovider", "--rlsdk-report", "report.json",
        "--rlsdk-basic", "torch,vllm",
        "-k", "test_mine or test_registration_place or test_plain or (TestOther and test_layout)",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    suites = {suite.suite: suite for suite in from_json((tmp_path / "report.json").read_text())}
    whole = requirements(TrainConformance)
    left_out = len(whole) - sum(whole.values())
    assert {name: suite.left_out for name, suite in suites.items()} == {
        "TestTorch": left_out, "TestSame": left_out, "TestOther": 0
    }  # fmt: skip
    assert [found.name for found in suites["TestSame"].findings] == ["registration.place", "mine"]
    assert "of what is claimed (basic requirements only)" in suites["TestSame"].badge
    assert suites["TestTorch"].passed
    assert f"LEFT OUT: {left_out} of {left_out + 1} requirements of torch (TestTorch)\n" in done.stdout
    assert "(TestOther)" not in done.stdout.partition("LEFT OUT")[2]


def test_the_command_runs_the_basic_requirements_by_its_flag() -> None:
    (suite,) = check_backend("torch", basic=True, processes=2)
    whole = requirements(TrainConformance)
    assert {found.name for found in suite.findings} == {name for name, is_basic in whole.items() if is_basic}
    assert suite.left_out == len(whole) - len(suite.findings)
    assert Counter(found.outcome for found in suite.findings)[Outcome.PASSED] >= 40
    assert suite.passed
    with pytest.raises(ConfigError, match="--basic and --only 'close' both choose requirements"):
        check_backend("torch", basic=True, only="close")
