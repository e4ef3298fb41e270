"""`make pythons`: each promised Python that is here compiles every module, and what was not checked is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tools"))

import pythons  # noqa: E402 - a tool, no package


def test_the_promised_versions_are_those_of_the_project() -> None:
    assert pythons.promised_versions((ROOT / "pyproject.toml").read_text()) == [11, 12, 13]


def test_interpreters_are_found_once_a_release_and_this_one_is_among_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, answer in (("3.12.3", "3 12 3"), ("3.13.0", "3 13 0"), ("3.9.1", "3 9 1"), ("3.13.9", "")):
        python = tmp_path / "versions" / name / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f"#!/bin/sh\necho {answer}\n")
        python.chmod(0o755)
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    found = pythons.interpreters([11, 12, 13])
    assert found[sys.version_info[:3]] == Path(sys.executable)
    assert {(3, 12, 3), (3, 13, 0)} <= set(found)
    assert (3, 9, 1) not in found


def test_a_module_that_an_interpreter_does_not_compile_is_named_with_the_error(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text("x = 1\n")
    (tmp_path / "wrong.py").write_text("def (\n")
    (tmp_path / "escape.py").write_text("x = 1 is 1\n")
    problems = pythons.compile_problems(Path(sys.executable), [str(path) for path in sorted(tmp_path.glob("*.py"))])
    assert [line.split(": ")[:2] for line in problems.splitlines()] == [
        [str(tmp_path / "escape.py"), "SyntaxError"],
        [str(tmp_path / "wrong.py"), "SyntaxError"],
    ]


def test_every_module_compiles_on_every_promised_python_that_is_here_and_the_rest_is_named() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "pythons.py")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    checked = {line.split()[1].rpartition(".")[0] for line in done.stdout.splitlines() if " compiles " in line}
    named = done.stdout.partition("this machine has none: Python ")[2].strip()
    assert checked | set(filter(None, named.split(", "))) == {"3.11", "3.12", "3.13"}
