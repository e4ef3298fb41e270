"""The kit of environments: one that holds everything passes, and each broken one is caught by its requirement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from broken import BROKEN, REFUSED, Safe
from typer.testing import CliRunner

from rlsdk.agents.conformance.lab import Lab
from rlsdk.agents.conformance.requirement import Verdict
from rlsdk.agents.conformance.suite import REQUIREMENTS, check
from rlsdk.agents.environments.tools import EnvironmentClass
from rlsdk.cli.commands import app
from rlsdk.interfaces import ConfigError

ROWS: list[dict[str, Any]] = [
    {"prompt": "Do it.", "answer": str(number), "solution": [{"name": "set", "arguments": {"number": number}}]}
    for number in (7, 9, 12, 3)
]


def lab_of(made: type) -> Lab:
    return Lab(environment=EnvironmentClass.of(made, "e.py:E"), rows=ROWS, call_s=0.5)


def test_an_environment_that_holds_everything_passes() -> None:
    findings = check(lab_of(Safe))
    assert [finding.requirement.number for finding in findings] == list(range(1, 22))
    odd = {finding.requirement.number: finding.text for finding in findings if finding.verdict is not Verdict.HELD}
    assert odd == {
        19: "it has no async method; others run in a thread of their own",
        21: "the class names no tools in `stateless`",
    }


def test_tools_without_state_are_those_that_a_class_names() -> None:
    class Searches(Safe):
        stateless = ("search",)

        def search(self, text: str) -> str:
            """Searches.

            Args:
                text: what for
            """
            return text.upper()

    (finding,) = check(lab_of(Searches), [21])
    assert finding.verdict is Verdict.HELD
    assert EnvironmentClass.of(type("All", (Safe,), {"stateless": True}), "e.py:E").stateless == {"set"}
    with pytest.raises(ConfigError, match=r"stateless names 'sett'; did you mean 'set'\?; expected True, or names"):
        EnvironmentClass.of(type("Other", (Safe,), {"stateless": ["sett"]}), "e.py:E")


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_environment_is_caught(name: str) -> None:
    number, made = BROKEN[name]
    (finding,) = check(lab_of(made), [number])
    expected = Verdict.WARNED if REQUIREMENTS[number - 1].warns else Verdict.FAILED
    assert (finding.verdict, bool(finding.text)) == (expected, True), finding


@pytest.mark.parametrize("name", REFUSED)
def test_tools_that_cannot_be_described_are_refused_as_they_are_read(name: str) -> None:
    with pytest.raises(ConfigError, match=r"set|reset"):
        EnvironmentClass.of(REFUSED[name], name)


def test_the_commands_write_and_check_an_environment(tmp_path: Path) -> None:
    runner, file = CliRunner(), tmp_path / "mine.py"
    made = runner.invoke(app, ["environments", "new", str(file)])
    assert (made.exit_code, f"check {file}:Guess" in made.output) == (0, True)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "Begin.", "answer": "{number}"}}\n' for number in (3, 9, 14)))
    found = runner.invoke(
        app, ["environments", "check", f"{file}:Guess", "--data", str(rows), "--option", "highest=15"]
    )
    assert found.exit_code == 0, found.output
    assert "tools guess; 18 held, 3 left out, on 3 rows" in found.output
    text = file.read_text().replace("return float(self._last == self._number)", 'return float("nan")')
    file = tmp_path / "other.py"
    file.write_text(text)
    found = runner.invoke(app, ["environments", "check", f"{file}:Guess", "--only", "12"])
    assert found.exit_code == 1
    assert " 12 FAILED   scores are finite, and the same twice: get_reward returned nan" in found.output
    odd = runner.invoke(app, ["environments", "check", f"{file}:Guess", "--only", "22"])
    assert "expected numbers of requirements, 1 to 21" in str(odd.exception)
