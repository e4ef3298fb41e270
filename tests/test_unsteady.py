"""A test that needs a second try is written down, and has none the next time."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
import run_tests
from run_tests import Outcome, Suite

FLAKY = "tests/cluster/test_x.py::test_y[a b]"


def outcome(*bad: str, code: int = 1) -> Outcome:
    suite = Suite(name="tests/cluster", paths=[Path("tests/cluster")])
    return Outcome(suite=suite, code=code, counts=Counter(passed=3, failed=len(bad)), bad=bad, output="")


def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outcomes: Sequence[Outcome]) -> tuple[int, list[str]]:
    """The exit code of a whole run whose only folder ends like this, and what was run."""
    asked: list[str] = []
    left = list(outcomes)

    def run(suite: Suite, only: Sequence[str] = (), *, covered: bool = False) -> Outcome:
        asked.append(" ".join(only) or "all")
        return left.pop(0)

    monkeypatch.setattr(run_tests, "UNSTEADY", tmp_path / "unsteady.txt")
    monkeypatch.setattr(run_tests, "LINES", tmp_path / "lines")
    monkeypatch.setattr(run_tests, "suites", lambda: [outcomes[0].suite])
    monkeypatch.setattr(run_tests, "run", run)
    monkeypatch.setattr(run_tests, "lines_of", lambda sources: {})
    monkeypatch.setattr(sys, "argv", ["run_tests"])
    with pytest.raises(SystemExit) as ended:
        run_tests.main()
    return int(ended.value.code or 0), asked


def test_a_second_try_that_passes_is_written_down_and_the_next_time_there_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = outcome(code=0)
    assert runs(monkeypatch, tmp_path, [outcome(FLAKY), whole]) == (0, ["all", FLAKY])
    assert f"PASSED ONLY AT THE SECOND TRY, now in unsteady.txt, fix it: {FLAKY}" in capsys.readouterr().out
    [(name, when)] = run_tests.unsteady(tmp_path / "unsteady.txt").items()
    assert (name, len(when)) == (FLAKY, len("2026-01-01"))

    assert runs(monkeypatch, tmp_path, [outcome(FLAKY)]) == (1, ["all"])
    assert f"unsteady since {when}, failed again, and gets no second try: {FLAKY}" in capsys.readouterr().out
    assert runs(monkeypatch, tmp_path, [whole]) == (0, ["all"])
    assert f"unsteady since {when}, passed at once: {FLAKY}" in capsys.readouterr().out


def test_a_second_try_that_fails_fails_the_run_and_is_not_written_down(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert runs(monkeypatch, tmp_path, [outcome(FLAKY), outcome(FLAKY)]) == (1, ["all", FLAKY])
    assert not (tmp_path / "unsteady.txt").exists()


def test_many_failures_are_no_accident(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    many = outcome(*(f"{FLAKY}{number}" for number in range(run_tests.MOST_REPEATED + 1)))
    assert runs(monkeypatch, tmp_path, [many])[1] == ["all"]


def test_the_list_of_this_repository_can_be_read() -> None:
    assert all("::" in name or name.startswith("all of") for name in run_tests.unsteady(run_tests.UNSTEADY))


def test_the_tests_that_failed_are_read_from_what_pytest_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CI", "true")  # where pytest shows a failure's message whole
    monkeypatch.setattr(run_tests, "LINES", tmp_path)
    file = tmp_path / "test_some.py"
    file.write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('word', ['a', 'b c'])\n"
        "def test_one(word):\n    assert word == 'a', 'several\\nlines'\n"
        "@pytest.fixture\ndef broken():\n    raise ValueError\n"
        "def test_two(broken):\n    pass\n"
        "def test_three():\n    pytest.skip('no engine')\n"
    )
    done = run_tests.run(Suite(name="tests/some", paths=[file]))
    assert done.code == 1
    assert [name.rpartition("/")[2] for name in done.bad] == ["test_some.py::test_one[b c]", "test_some.py::test_two"]
    assert done.counts == Counter(failed=1, passed=1, skipped=1, error=1)
    assert "no engine" in done.output
