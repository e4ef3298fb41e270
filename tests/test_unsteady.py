"""A test that passes only at a second try fails a strict run, unless it is listed with a reason; the longest first."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
import run_tests
from run_tests import Outcome, Suite

FLAKY = "tests/cluster/test_x.py::test_y[a b]"


def outcome(*bad: str, code: int = 1) -> Outcome:
    suite = Suite(name="tests/cluster", paths=[Path("tests/cluster")])
    return Outcome(suite=suite, code=code, counts=Counter(passed=3, failed=len(bad)), bad=bad, output="")


def runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outcomes: Sequence[Outcome], strict: bool = False
) -> tuple[object, list[str]]:
    """How a whole run ends whose only folder ends like this, and what was run."""
    asked: list[str] = []
    left = list(outcomes)

    def run(suite: Suite, only: Sequence[str] = (), *, covered: bool = False) -> Outcome:
        asked.append(" ".join(only) or "all")
        return left.pop(0)

    monkeypatch.setattr(run_tests, "UNSTEADY", tmp_path / "unsteady.txt")
    monkeypatch.setattr(run_tests, "DURATIONS", tmp_path / "durations.txt")
    monkeypatch.setattr(run_tests, "ROOT", tmp_path)
    monkeypatch.setattr(run_tests, "LINES", tmp_path / "lines")
    monkeypatch.setattr(run_tests, "suites", lambda: [outcomes[0].suite])
    monkeypatch.setattr(run_tests, "run", run)
    monkeypatch.setattr(run_tests, "lines_of", lambda sources: {})
    monkeypatch.setattr(sys, "argv", ["run_tests", *(["--strict"] if strict else [])])
    with pytest.raises(SystemExit) as ended:
        run_tests.main()
    return ended.value.code, asked


@pytest.mark.parametrize("strict", [True, False])
def test_a_second_try_that_passes_fails_a_strict_run_and_is_named_everywhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], strict: bool
) -> None:
    outcomes = [outcome(FLAKY), outcome(code=0)]
    assert runs(monkeypatch, tmp_path, outcomes, strict=strict) == (int(strict), ["all", FLAKY])
    said = capsys.readouterr().out
    assert f"PASSED ONLY AT THE SECOND TRY: {FLAKY}. Fix it; until then, say why in unsteady.txt: 20" in said
    assert f" | {FLAKY} | reason\n" in said
    assert f"suites that failed: {['tests/cluster'] if strict else 'none'}\n" in said
    assert said.endswith("3 passed, 1 failed, 0 skipped\n" if strict else "6 passed, 0 failed, 0 skipped\n")


def test_a_process_that_died_and_a_second_that_did_not_fail_a_strict_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = [outcome(code=-11), outcome(code=0)]
    assert runs(monkeypatch, tmp_path, outcomes, strict=True) == (1, ["all", "all"])
    assert "PASSED ONLY AT THE SECOND TRY: all of tests/cluster (exit code -11)" in capsys.readouterr().out


def test_a_test_that_is_listed_with_a_reason_may_pass_at_its_second_try(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "unsteady.txt").write_text(f"# Comment\n2026-11-28 | {FLAKY} | Ray 2.60 loses a reply: issue 4711\n")
    why = "unsteady since 2026-11-28 (Ray 2.60 loses a reply: issue 4711)"
    whole = outcome(code=0)
    assert runs(monkeypatch, tmp_path, [outcome(FLAKY), whole], strict=True) == (0, ["all", FLAKY])
    assert f"{why}, needed a second try: {FLAKY}" in capsys.readouterr().out
    assert runs(monkeypatch, tmp_path, [whole], strict=True) == (0, ["all"])
    assert f"{why}, passed at once: {FLAKY}" in capsys.readouterr().out
    assert runs(monkeypatch, tmp_path, [outcome(FLAKY), outcome(FLAKY)]) == (1, ["all", FLAKY])
    assert f"{why}, failed twice: {FLAKY}" in capsys.readouterr().out
    assert runs(monkeypatch, tmp_path, [outcome(FLAKY, FLAKY + "2"), whole], strict=True)[0] == 1


@pytest.mark.parametrize("line", [f"2026-11-28 {FLAKY}", f"2026-11-28 | {FLAKY} | ", f"{FLAKY} | no date"])
def test_a_line_without_a_date_or_a_reason_is_refused_by_number(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str
) -> None:
    (tmp_path / "unsteady.txt").write_text(f"# Comment\n{line}\n")
    ended, asked = runs(monkeypatch, tmp_path, [outcome(FLAKY)])
    assert str(ended).startswith("unsteady.txt, line 2: expected `YYYY-MM-DD | test | reason`, not ")
    assert asked == []


def test_a_second_try_that_fails_fails_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert runs(monkeypatch, tmp_path, [outcome(FLAKY), outcome(FLAKY)]) == (1, ["all", FLAKY])


def test_the_longest_suites_begin_first_and_each_file_is_in_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run_tests, "DURATIONS", tmp_path / "durations.txt")
    every = run_tests.suites()
    known = [(suite, 7.0 * at) for at, suite in enumerate(every[2:])]
    run_tests.record(run_tests.DURATIONS, [replace(outcome(), suite=suite, seconds=s) for suite, s in known])
    found = run_tests.longest_first(every)
    assert {suite.name for suite in found[:2]}.isdisjoint(suite.name for suite, _ in known), "new ones may be long"
    assert found[2:] == [suite for suite, _ in reversed(known)]
    run_tests.record(run_tests.DURATIONS, [replace(outcome(), suite=found[-1], seconds=1e4)])
    assert run_tests.longest_first(every)[2] == found[-1]
    # A suite that runs in part is known by that, too.
    part = replace(found[0], basic=["vllm"])
    run_tests.record(run_tests.DURATIONS, [replace(outcome(), suite=part, seconds=3.0)])
    assert [suite.basic for suite in run_tests.longest_first([part, found[0]])] == [(), ["vllm"]]
    paths = [path for suite in found for path in suite.paths]
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("test_*.py"))]
    folders = (run_tests.ROOT / "tests", *(run_tests.ROOT / "plugins").glob("*/tests"))
    assert Counter(files) == Counter(file for folder in folders for file in folder.rglob("test_*.py"))


def test_many_failures_are_no_accident(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    many = outcome(*(f"{FLAKY}{number}" for number in range(run_tests.MOST_REPEATED + 1)))
    assert runs(monkeypatch, tmp_path, [many])[1] == ["all"]


def test_the_lists_of_this_repository_can_be_read_and_name_what_there_is() -> None:
    listed = run_tests.unsteady(run_tests.UNSTEADY)
    assert all((run_tests.ROOT / name.partition("::")[0]).exists() or name.startswith("all of") for name in listed)
    known = {name.removesuffix(" in part") for name in run_tests.durations(run_tests.DURATIONS)}
    assert known <= {suite.name for suite in run_tests.suites()}


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
