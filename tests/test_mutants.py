"""`tools.mutants`: what it changes, and how it knows which requirements run a line."""

from __future__ import annotations

import ast
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

import rlsdk.testing

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tools.mutants.__main__ import drawn_by, reasons, slow_ones  # noqa: E402
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
    assert drawn == drawn_by(engine, 3, 4)
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
    assert "life" in slow_ones(report, 4.0)
    assert not slow_ones(report, 1e9)
    assert not slow_ones(report.with_name("none.json"), 0.0)
