"""The kit itself: numbers, p-values, reports, and the command for plugins without a test file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mpmath
import psutil
import pytest
import torch

from rlsdk.interfaces import (
    BackendKind,
    Capability,
    ConfigError,
    GenerationOutput,
    GenerationRequest,
    PluginNotFoundError,
    RolloutEngine,
)
from rlsdk.testing import RolloutConformance, ShardingConformance, TrainConformance, check
from rlsdk.testing.check import check_backend
from rlsdk.testing.process.resources import held, left_behind
from rlsdk.testing.rollout.statistics import FALSE_ALARM, chi_square_p
from rlsdk.testing.suites.report import Finding, Outcome, SuiteReport, from_json, print_report, to_json
from rlsdk.testing.suites.requirements import MARK, NUMBERS, Measured, Number, required, requirement
from rlsdk.testing.suites.shared_runs import DRAWN, ELSEWHERE, SEEDS, join_reports


def test_a_number_out_of_bounds_fails_with_what_it_was_and_had_to_be() -> None:
    properties: list[tuple[str, object]] = []
    measured = Measured(properties)
    measured.at_most("difference", 1e-6, 1e-4)
    with pytest.raises(AssertionError, match=r"difference: 0\.2, expected <= 0\.0001"):
        measured.at_most("difference", 0.2, 1e-4)
    with pytest.raises(AssertionError, match="difference: nan"):
        measured.at_most("difference", float("nan"), 1e-4)
    with pytest.raises(AssertionError, match="rows: 2, expected none: a; b"):
        measured.none("rows", ["a", "b"])
    assert properties[0][0] == NUMBERS
    assert measured.numbers[0] == Number("difference", 1e-6, "<= 0.0001")
    assert len(measured.numbers) == 4


def test_a_requirement_says_what_it_requires() -> None:
    with pytest.raises(ValueError, match="'nameless' needs a docstring"):

        @requirement("nameless", needs=Capability.SEED)
        def nothing() -> None: ...


@pytest.mark.parametrize("suite", [RolloutConformance, TrainConformance, ShardingConformance])
def test_no_requirement_hides_another(suite: type[Any]) -> None:
    found = [
        (mark.args[0], name, function)
        for kind in suite.__mro__
        for name, function in vars(kind).items()
        for mark in getattr(function, "pytestmark", ())
        if mark.name == MARK
    ]
    assert [name for _, name, function in found if getattr(suite, name) is not function] == []
    names = [requirement for requirement, _, _ in found]
    assert len(set(names)) == len(names) > 8


def test_p_values_are_those_of_the_chi_square_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.03125, 0.03125], dtype=torch.float64)
    counts = torch.tensor([520, 240, 130, 50, 35, 25])
    expected = probabilities * 1000
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square_p(counts, probabilities) == pytest.approx(
        float(mpmath.gammainc(2.5, statistic / 2, mpmath.inf, regularized=True)), rel=1e-9
    )
    assert chi_square_p(torch.tensor([1, 0]), torch.tensor([0.0, 1.0])) == 0
    assert chi_square_p(torch.tensor([0, 9]), torch.tensor([0.0, 1.0])) == 1


def test_right_draws_pass_and_draws_a_tenth_off_do_not() -> None:
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.rand(128, generator=generator, dtype=torch.float64) ** 3
    probabilities /= probabilities.sum()
    values = []
    for _ in range(200):
        drawn = torch.multinomial(probabilities, 2000, replacement=True, generator=generator)
        values.append(chi_square_p(torch.bincount(drawn, minlength=128), probabilities))
    # Were the p-values not uniform, the false-alarm rate would not be what it says.
    assert min(values) > FALSE_ALARM
    assert 0.3 < sum(values) / len(values) < 0.7
    flattened = 0.9 * probabilities
    flattened[probabilities.argmax()] += 0.1
    drawn = torch.multinomial(flattened, 2000, replacement=True, generator=generator)
    assert chi_square_p(torch.bincount(drawn, minlength=128), probabilities) < FALSE_ALARM


def report() -> SuiteReport:
    return SuiteReport(
        suite="TestMine",
        backend="mine",
        kind="rollout",
        plugin="my-plugin 2.0",
        interface="1.0",
        rlsdk="0.1.0",
        engine={"engine": "3.1"},
        findings=(
            Finding(name="seed", doc="Seeds count.", outcome=Outcome.PASSED, numbers=(Number("changed", 0, "== 0"),)),
            Finding(name="abort", doc="Abort ends.", outcome=Outcome.NOT_CLAIMED, capability="abort"),
            Finding(name="close", doc="Nothing stays.", outcome=Outcome.FAILED, message="left behind: [port 5]"),
        ),
    )


def test_a_report_survives_json_and_counts_what_is_claimed(capsys: pytest.CaptureFixture[str]) -> None:
    found = report()
    (again,) = from_json(to_json([found]))
    assert again.findings[0].numbers == [Number("changed", 0, "== 0")]
    assert (again.badge, again.passed) == (found.badge, False)
    assert found.badge == (
        "rlsdk 0.1.0 conformance · rollout mine · 1/2 of what is claimed · my-plugin 2.0 · engine 3.1 · interface 1.0"
    )
    print_report([found])
    said = capsys.readouterr().out
    assert "left behind: [port 5]" in said
    assert "changed: 0 (== 0)" in said
    with pytest.raises(ValueError, match="format 99"):
        from_json(json.dumps({"format": 99}))


def test_reports_of_processes_are_joined_and_seeds_that_gave_other_tokens_in_one_fail(tmp_path: Path) -> None:
    mine, theirs = report(), report()
    other = [replace(found, outcome=Outcome.NOT_RUN, message=ELSEWHERE) for found in mine.findings]
    mine = replace(mine, findings=(mine.findings[0], *other[1:]))
    theirs = replace(theirs, findings=(other[0], *theirs.findings[1:]))
    joined = join_reports([mine, theirs], tmp_path)
    assert joined == report()
    # Neither ran it: that is not taken for passed.
    assert not join_reports([replace(mine, findings=tuple(other))] * 2, tmp_path).passed
    keys = [[[5, 6], at, 0, 1.0, 0, 1.0, 0.0] for at in range(4)]
    for name, texts in (("a", [[1, 2, 3]] * 4), ("b", [[1, 2], [1, 2, 3, 4], [1, 9], [7]])):
        (tmp_path / f"{name}{DRAWN}").write_text(json.dumps(list(zip(keys, texts, strict=True))))
    failed = {found.name: found for found in join_reports([mine, theirs], tmp_path).findings}[SEEDS]
    assert (failed.outcome, failed.message.count("[[5, 6]")) == (Outcome.FAILED, 2)
    # One may be rounding's.
    (tmp_path / f"b{DRAWN}").write_text(json.dumps(list(zip(keys, [[1, 2], [1, 9]], strict=False))))
    assert join_reports([mine, theirs], tmp_path) == report()


@pytest.mark.parametrize(
    ("cores", "settings", "processes"),
    [
        (1, {}, 1),
        (2, {}, 2),
        (2, {"device": "cuda:0"}, 1),
        (2, {"tp_size": 2}, 1),
        (4, {"tp_size": 2}, 2),
        (6, {}, 4),
        (64, {}, 4),
        (64, {"device": "cuda:0"}, 1),
    ],
)
def test_processes_share_a_suite_where_there_is_a_core_for_each_worker(
    cores: int, settings: dict[str, object], processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert check._most_processes(settings) == processes


def test_what_an_engine_leaves_is_named(tmp_path: Path) -> None:
    before = held(tmp_path)
    (tmp_path / "left.bin").write_bytes(b"x")
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert left_behind(before, tmp_path) == [f"file {tmp_path / 'left.bin'}", f"process {process.pid}"]
    finally:
        process.kill()
        process.wait()


def test_a_plugin_without_a_test_file_is_checked_by_name(tmp_path: Path) -> None:
    (suite,) = check_backend("transformers", settings={"max_running": 8}, only="registration or greedy", processes=2)
    assert (suite.title, suite.kind, suite.passed) == ("transformers (max_running=8)", "rollout", True)
    assert [found.name for found in suite.findings if found.name == "greedy"] == ["greedy"]
    named = [found.name for found in suite.findings if found.outcome is Outcome.PASSED]
    assert all(name.startswith("registration.") or "greedy" in name for name in named)
    assert len(named) > 4
    assert len(suite.findings) == len({found.name for found in suite.findings}) == len(named)
    assert suite.seconds > sum(found.seconds for found in suite.findings) / 2
    (suite,) = check_backend("transformers", only="registration.light")
    assert [found.name for found in suite.findings] == ["registration.light"]
    with pytest.raises(ConfigError, match="--only 'greddy': no requirement of 'transformers' goes by that"):
        check_backend("transformers", only="greddy")
    with pytest.raises(ConfigError, match="RolloutConformance has no setting 'tp_sise'; did you mean 'tp_size'"):
        check_backend("transformers", settings={"tp_sise": 2})
    with pytest.raises(PluginNotFoundError, match="no backend is named 'transfomers'; did you mean 'transformers'"):
        check_backend("transfomers")
    with pytest.raises(PluginNotFoundError, match="transformers"):
        check_backend("transformers", kind=BackendKind.TRAIN)


HANGING = """
import os, pathlib, subprocess, sys, time
import pytest

@pytest.fixture
def engine():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    note = pathlib.Path("pids.part")
    note.write_text(f"{os.getpid()} {child.pid}")
    yield note
    child.kill()
    child.wait()
    pathlib.Path("closed").touch()

def test_hangs(engine):
    engine.rename("pids")  # not in the fixture: one that is interrupted before it yields is not closed
    time.sleep(300)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_check_that_is_killed_takes_its_pytest_along_which_closes_its_engines(number: int, tmp_path: Path) -> None:
    (tmp_path / "test_hanging.py").write_text(HANGING)
    code = (
        # Ignored in whatever a shell runs in the background, as these tests may be.
        "import pathlib, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from rlsdk.testing.suites.child_processes import run_child; run_child([sys.executable, '-m', 'pytest', "
        "'test_hanging.py', '-p', 'rlsdk.testing.plugin', '-p', 'no:cacheprovider', '-c', '/dev/null', '--rootdir', "
        "'.'], pathlib.Path.cwd(), None)"
    )
    check = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.DEVNULL,
                             stderr=subprocess.DEVNULL)  # fmt: skip
    wait_until((tmp_path / "pids").exists)
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    check.send_signal(number)
    assert check.wait(60) == -number
    wait_until(lambda: not any(map(psutil.pid_exists, pids)))
    assert (tmp_path / "closed").exists()


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_pytest_plugin_is_light() -> None:
    code = (
        "import sys, rlsdk.testing.plugin; print(*sorted({'torch', 'ray', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ})
    assert done.stdout.strip() == ""


def test_sessions_of_others_do_not_import_rlsdk_and_suites_ask_for_the_plugin(tmp_path: Path) -> None:
    """Where rlsdk is installed, its plugin loads only where it is named."""
    (tmp_path / "test_theirs.py").write_text(
        "import sys\n\ndef test_theirs():\n    assert not [name for name in sys.modules if name.startswith('rlsdk')]\n"
    )
    (tmp_path / "test_suite.py").write_text(
        "from rlsdk.testing import TrainConformance\n\nclass TestMine(TrainConformance):\n    backend = 'torch'\n"
    )
    command = [sys.executable, "-P", "-m", "pytest", "-c", os.devnull, "--rootdir", str(tmp_path), "-q"]
    command += ["-p", "no:cacheprovider", "-W", "ignore::pytest.PytestUnknownMarkWarning"]
    done = subprocess.run([*command, "test_theirs.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    asked = [*command, "test_suite.py", "-k", "test_registration_light"]
    done = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert 'TestMine needs the pytest plugin of rlsdk: write `pytest_plugins = ["rlsdk.testing.plugin"]`' in done.stdout
    done = subprocess.run([*asked, "-p", "rlsdk.testing.plugin"], cwd=tmp_path, check=False, capture_output=True)
    assert done.returncode == 0


OVERCLAIMING = """
import sys
import pytest
from rlsdk.interfaces import BackendKind, BackendSpec, Capability, hookimpl
from rlsdk.testing import RolloutConformance, requirement

@hookimpl
def rlsdk_register_backends(register):
    register(BackendSpec(name="proud", kind=BackendKind.ROLLOUT, description="Claims what it cannot show.",
        engine="rlsdk.reference.transformers_rollout:TransformersRolloutEngine",
        capabilities=frozenset({Capability.LORA, Capability.ROUTED_EXPERTS, Capability.VALUE_HEAD})))

class TestProud(RolloutConformance):
    backend = "proud"
    modules = (sys.modules[__name__],)

class TestCut(TestProud):
    @requirement("registration.light")
    def test_registration_light(self):
        "Ends the run."
        pytest.exit("enough")

    @requirement("registration.later")
    def test_registration_later(self):
        "Is never reached."
"""


def test_what_nothing_measures_or_was_cut_off_is_not_run_and_a_claim_of_another_kind_fails(tmp_path: Path) -> None:
    (tmp_path / "test_proud.py").write_text(OVERCLAIMING)
    command = [
        sys.executable, "-m", "pytest", "test_proud.py", "-c", os.devnull, "--rootdir", str(tmp_path), "-q",
        "-p", "rlsdk.testing.plugin", "-p", "no:cacheprovider", "--rlsdk-report", "report.json",
        "-k", "TestCut and registration or TestProud and (capabilities or lora or routed_experts or multimodal)",
    ]  # fmt: skip
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    suite, cut = from_json((tmp_path / "report.json").read_text())
    outcomes = [(finding.name, finding.outcome) for finding in cut.findings][-2:]
    assert outcomes == [("registration.light", Outcome.NOT_RUN), ("registration.later", Outcome.NOT_RUN)]
    assert len(cut.findings) == 6
    found = {finding.name: finding for finding in suite.findings}
    assert found["unmeasured.lora"].outcome is found["unmeasured.routed_experts"].outcome is Outcome.NOT_RUN
    assert found["unmeasured.multimodal"].outcome is Outcome.NOT_CLAIMED
    assert "no requirement measures it" in found["unmeasured.lora"].message
    failed = found["registration.capabilities"]
    assert (failed.outcome, suite.passed) == (Outcome.FAILED, False)
    assert "claimed, and no capability of a rollout engine: 1, expected none: value_head" in failed.message


UNUSABLE = """
import sys
from rlsdk.testing import RolloutConformance, TrainConformance, requirement

class TestNameless(TrainConformance):
    backend = "no-such-backend"

class TestMistyped(RolloutConformance):
    backend = "transfomers"

class Lab:
    def close(self):
        raise RuntimeError("a process that does not end")

class TestTied:
    backend = "tied"

    @requirement("first")
    def test_first(self, rlsdk_lab):
        "Uses the lab."

    @requirement("last")
    def test_last(self, rlsdk_lab):
        "Uses it too."

    @classmethod
    def make_lab(cls, folder):
        return Lab()

class TestClosing(TestTied, TrainConformance):
    backend = "torch"
"""


def test_a_bad_name_is_one_failure_and_an_end_that_fails_a_row_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "test_names.py").write_text(UNUSABLE)
    command = [
        sys.executable, "-m", "pytest", "test_names.py", "-c", os.devnull, "--rootdir", str(tmp_path), "-q",
        "-p", "rlsdk.testing.plugin", "-p", "no:cacheprovider", "--rlsdk-report", "report.json",
        "-k", "TestNameless or TestMistyped or TestClosing and (test_first or test_last)",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert " error" not in done.stdout.splitlines()[-1]
    nameless, mistyped, closing = from_json((tmp_path / "report.json").read_text())
    for suite, said in ((nameless, "no-such-backend"), (mistyped, "did you mean 'transformers'")):
        (failed,) = (finding for finding in suite.findings if finding.outcome is Outcome.FAILED)
        assert failed.name == "registration.usable"
        assert said in failed.message
        assert suite.count(Outcome.NOT_RUN) == len(suite.findings) - 1 > 40
    assert {finding.name: finding.outcome for finding in closing.findings} == {
        "first": Outcome.PASSED,
        "last": Outcome.PASSED,
        "suite.close": Outcome.FAILED,
    }
    assert "a process that does not end" in closing.findings[-1].message


def test_the_end_of_processes_is_charged_to_no_requirement(tmp_path: Path) -> None:
    (tmp_path / "test_slow.py").write_text(SLOW)
    command = [
        sys.executable, "-m", "pytest", "test_slow.py", "-c", os.devnull, "--rootdir", str(tmp_path), "-q",
        "-p", "rlsdk.testing.plugin", "-p", "no:cacheprovider", "--rlsdk-report", "report.json", "-k", "last",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    (suite,) = from_json((tmp_path / "report.json").read_text())
    assert (tmp_path / "closed").exists()
    assert suite.findings[-1].seconds < 5.0


SLOW = """
import pathlib, time
from rlsdk.testing import TrainConformance, requirement

class Lab:
    def close(self):
        time.sleep(5.0)
        pathlib.Path("closed").touch()

class TestSlow(TrainConformance):
    backend = "torch"

    @classmethod
    def make_lab(cls, folder):
        return Lab()

    @requirement("last")
    def test_last(self, rlsdk_lab):
        "Uses the lab."
"""


def test_every_capability_has_its_line_in_a_report() -> None:
    assert required(RolloutConformance) | required(TrainConformance) == set(Capability)


@pytest.mark.parametrize("page", ["compatibility", "broken_engines"])
def test_pages_that_tools_write_are_what_they_would_write(page: str) -> None:
    tool = Path(__file__).parents[2] / "tools" / f"{page}.py"
    done = subprocess.run([sys.executable, str(tool), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class Overtaken:
    """Right by the contract ("as it finishes, in any order"): in its first call a thread is late with a sample."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine, self.num_calls = engine, 0

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        self.num_calls += 1
        late: list[GenerationOutput] = []
        async for output in self.engine.generate(requests):
            if self.num_calls == 1 and not late:
                late.append(output)
            else:
                yield output
        for output in late:
            yield output


def test_a_sample_that_a_thread_overtakes_is_no_fault(tmp_path: Path) -> None:
    suite = type("Own", (RolloutConformance,), {"backend": "transformers"})
    lab = suite.make_lab(tmp_path)
    engine, numbers = Overtaken(lab.engine), Measured([])
    try:
        suite.test_streaming(suite(), engine, lab, numbers)
    finally:
        lab.close()
    assert engine.num_calls == 2


@pytest.mark.parametrize("suite", [RolloutConformance, TrainConformance, ShardingConformance])
def test_every_test_of_a_suite_is_a_requirement_of_its_own_name(suite: type) -> None:
    """One without a name would run, and be in no report."""
    tests = {name: getattr(suite, name) for name in dir(suite) if name.startswith("test_")}
    marks = {name: [m for m in getattr(test, "pytestmark", ()) if m.name == MARK] for name, test in tests.items()}
    assert [name for name, found in marks.items() if len(found) != 1] == []
    names = [found[0].args[0] for found in marks.values()]
    assert len(set(names)) == len(names)
