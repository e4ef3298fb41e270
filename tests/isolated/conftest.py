"""Environments of engines beside this one, and a home of rlsdk that knows nothing yet."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

LEFT_OUT = pytest.StashKey[set[str]]()


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def environment_of() -> Callable[[str], Path]:
    """The environment that `make test` makes for the tests of a plugin: that of Megatron has vLLM, too."""

    def find(name: str) -> Path:
        folder = Path(f"{sys.prefix.removesuffix('-dev')}-{'megatron' if name == 'vllm' else name}")
        assert (folder / "bin" / "python").exists(), f"{folder} is not there; run: make test"
        return folder

    return find


@pytest.fixture(scope="session")
def left_out(pytestconfig: pytest.Config) -> set[str]:
    """What the suites of published engines left out, as they say it."""
    return pytestconfig.stash.setdefault(LEFT_OUT, set())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in sorted(config.stash.get(LEFT_OUT, set())):
        terminalreporter.write_line(line)
