"""What a run says of the broken engines that it left out."""

from __future__ import annotations

import sys

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    runs = sys.modules.get("broken_runs")
    kinds = sys.modules.keys() & KINDS.keys()
    for line in runs.left_out(*(kind for name in sorted(kinds) for kind in KINDS[name])) if runs else ():
        terminalreporter.write_line(line)


KINDS = {"test_broken_rollout": ("rollout",), "test_broken_train": ("train", "sharding manager")}
"""Module -> kinds of broken engines that it runs."""
