"""`tools.mutants`: what it changes, and how it knows which requirements run a line."""

from __future__ import annotations

import ast
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import psutil
import pytest

import rlsdk.testing

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tools.mutants import __main__ as program  # noqa: E402
from tools.mutants.__main__ import Bench, digest, drawn_by, read_file, reasons, slow_ones  # noqa: E402
from tools.mutants.engines import ENGINES, Engine  # noqa: E402
from tools.mutants.instrument import instrumented  # noqa: E402
from tools.mutants.operators import mutants, mutated  # noqa: E402

SOURCE = '''"""Text stays."""

LIMIT = 3


def admitted(rows: int, free: int = 2) -> bool:
    """Stays, too."""
    if rows < free and not rows == LIMIT:
        return True
    if rows > 99:
        raise ValueError(f"{rows + 1} rows")
    return False
'''


def test_a_mutant_is_one_change_of_code() -> None:
    found = {(mutant.line, mutant.before, mutant.after) for mutant in mutants(SOURCE)}
    assert (6, "2", "3") in found
    assert (8, "rows < free", "rows <= free") in found
    assert (8, "rows < free", "rows >= free") in found
    assert (8, "rows < free and (not rows == LIMIT)", "rows < free or not rows == LIMIT") in found
    assert (8, "not rows == LIMIT", "rows == LIMIT") in found
    assert (11, "raise ValueError(f'{rows + 1} rows')", "pass") in found
    # Neither constants of the module, nor docstrings, nor what an error says.
    assert not any(line in (1, 3, 7) for line, _, _ in found)
    assert not any("rows + 1" in before for _, before, _ in found if "raise" not in before)


@pytest.mark.parametrize("engine", ENGINES)
def test_mutants_of_an_engine_differ_from_it_and_compile(engine: str) -> None:
    drawn = drawn_by(engine, 3, 4)
    # A call with a larger count goes on behind the rows of the one before.
    for count in (4, 100, 500):
        assert drawn == drawn_by(engine, 3, count)[:4]
    for path, mutant in drawn:
        plain = (ROOT / path).read_text()
        changed = mutated(plain, mutant.number)
        compile(changed, path, "exec")
        assert changed != ast.unparse(ast.parse(plain))


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_what_is_run_first_is_there(engine: Engine) -> None:
    suite = getattr(rlsdk.testing, engine.suite)
    assert all(callable(getattr(suite, name)) for name in engine.first)


def test_statements_note_that_they_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    hits: set[str] = set()
    module = ModuleType("mutants_hits")
    module.hits = hits  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mutants_hits", module)
    names: dict[str, object] = {}
    exec(compile(instrumented(SOURCE, "a.py"), "a.py", "exec"), names)
    admitted = names["admitted"]
    assert callable(admitted)
    assert admitted(1)
    assert hits == {"a.py:6", "a.py:7", "a.py:8", "a.py:9"}
    hits.clear()
    assert not admitted(random.Random(0).randrange(4, 9))
    assert {"a.py:10", "a.py:12"} <= hits
    assert "a.py:11" not in hits


def test_what_was_read_is_named_by_number(tmp_path: Path) -> None:
    file = tmp_path / "torch-1.read"
    assert reasons(file) == {}
    file.write_text("0 outside: CUDA\n\n12 equivalent: max is symmetric\n")
    assert reasons(file) == {0: "outside: CUDA", 12: "equivalent: max is symmetric"}


def test_slow_requirements_are_those_of_the_last_report() -> None:
    report = ROOT / "docs" / "conformance" / "torch.json"
    assert "random_calls" in slow_ones(report, 4.0)
    assert not slow_ones(report, 1e9)
    assert not slow_ones(report.with_name("none.json"), 0.0)


def test_files_of_results_are_those_of_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old line numbers said of mutants behind an edit that no requirement runs them."""
    engine = Engine(suite="TrainConformance", settings="", files=["engine.py"], first=())
    monkeypatch.setattr(program, "ROOT", tmp_path)
    monkeypatch.setattr(program, "__file__", str(tmp_path / "tools" / "mutants" / "__main__.py"))
    monkeypatch.setitem(ENGINES, "mine", engine)
    sources = {
        "drawn": [tmp_path / "engine.py", tmp_path / "tools" / "mutants" / "operators.py"],
        "judged": [tmp_path / "rlsdk" / "testing" / "lab.py", tmp_path / "tools" / "mutants" / "watching.py"],
    }
    for path in (*sources["drawn"], *sources["judged"]):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("a = 1\n")

    def digests() -> tuple[str, str, str]:
        return digest("mine"), digest("mine", with_suite=True), read_file("mine", 1).name

    for kind, files in sources.items():
        for path in files:
            drawn, judged, read = digests()
            assert digests() == (drawn, judged, read)
            path.write_text("\n" + path.read_text())
            assert (digest("mine") != drawn) == (kind == "drawn") == (read_file("mine", 1).name != read)
            assert digest("mine", with_suite=True) != judged


def test_what_was_read_is_not_among_the_files_that_make_clean_removes() -> None:
    removed = (ROOT / "Makefile").read_text().partition("\nclean:")[2].split()
    kept = read_file("torch", 1).relative_to(ROOT)
    assert "mutants" in removed
    assert not any(kept.is_relative_to(one) for one in removed)


@pytest.mark.parametrize(("limit_s", "outcome"), [(100.0, "hung"), (70.0, "slow"), (30.0, "slow")])
def test_a_limit_that_the_right_engine_needs_too_catches_nothing(limit_s: float, outcome: str, tmp_path: Path) -> None:
    path, mutant = drawn_by("torch", 3, 1)[0]
    bench = Bench.__new__(Bench)
    bench.name, bench.engine, bench.limit_s = "torch", ENGINES["torch"], limit_s
    bench.folder = bench.tree = tmp_path
    bench.plain, bench.noted = {path: (ROOT / path).read_text()}, {path: ""}
    (tmp_path / path).parent.mkdir(parents=True)
    tests = {"t.py::TestMutant::test_gradient": {"seconds": 30.0, "ran": []}, "t.py::x": {"seconds": 10.0, "ran": []}}
    bench.__dict__ |= {"trace": lambda: {"shared": [], "tests": tests}, "_fork": lambda *_: None}
    row = bench.judge(path, mutant)
    assert row["outcome"] == outcome
    assert row["by"] == ("" if outcome == "hung" else "the right engine takes 40 s for these: --limit 80")
    assert (tmp_path / path).read_text() == (ROOT / path).read_text()


WAITING = """
import signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tools.mutants.__main__ import Bench

signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
bench = Bench.__new__(Bench)
bench.name, bench.folder, bench.tree = "torch", Path(sys.argv[2]), Path(sys.argv[2])
bench._fork(["test_long.py"], object, 600.0)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_pytest_ends_with_the_program_that_waits_for_it(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_long.py").write_text(
        "import os, pathlib, time\n\n\ndef test_long():\n    draft = pathlib.Path('draft')\n"
        "    draft.write_text(str(os.getpid()))\n    draft.rename('pid')\n    time.sleep(300)\n"
    )
    program = subprocess.Popen([sys.executable, "-c", WAITING, str(ROOT), str(tmp_path)], stderr=subprocess.DEVNULL)
    family: list[psutil.Process] = []
    try:
        while not (tmp_path / "pid").exists():
            assert program.poll() is None
            time.sleep(0.01)
        family = [psutil.Process(int((tmp_path / "pid").read_text()))]
        program.send_signal(number)
        assert program.wait(30)
        assert not family[0].is_running()
    finally:
        for process in (program, *family):
            with suppress(psutil.Error):
                process.kill()
        program.wait()
