"""Two plugins of pytest, for processes that run a suite on a tree of `tools.mutants`."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

MARK = "rlsdk_requirement"
"""As in `rlsdk.testing.suites.requirements`."""


class Tracing:
    """Takes down how long each requirement of the right engine took, and which statements it ran, as `FILE:LINE`:
    they note it in a module of the tree, `mutants_hits`. Slow ones are left out."""

    def __init__(self, file: Path, slow: Collection[str]) -> None:
        self.file, self.slow = file, slow
        self.shared: set[str] = set()
        """Ran while an engine was started that several requirements may share: counts for all of them."""
        self.found: dict[str, Any] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        names = [mark.args[0] if (mark := item.get_closest_marker(MARK)) else "" for item in items]
        items[:] = [item for item, name in zip(items, names, strict=True) if name not in self.slow]

    def pytest_collection_finish(self) -> None:
        from mutants_hits import hits  # type: ignore[import-not-found]

        from rlsdk.testing.rollout.lab import RolloutLab

        self.hits: set[str] = hits
        self.shared |= hits
        start = RolloutLab.start

        def started(lab: RolloutLab, **fields: Any) -> Any:
            before = set(self.hits)
            self.hits.clear()
            engine = start(lab, **fields)
            self.shared |= self.hits
            self.hits |= before
            return engine

        setattr(RolloutLab, "start", started)  # noqa: B010 - another signature

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.hits.clear()
        result = yield
        if item.nodeid in self.found:
            self.found[item.nodeid]["ran"] = sorted(self.hits)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.found[report.nodeid] = {"seconds": round(report.duration, 2), "ran": []}

    def pytest_sessionfinish(self) -> None:
        self.file.write_text(json.dumps({"shared": sorted(self.shared), "tests": self.found}), encoding="utf-8")


class Stopping:
    """Ends the run at the first failure, but for requirements that are tried first to see whether anything works."""

    def __init__(self, file: Path, first: Collection[str]) -> None:
        self.file, self.first = file, set(first)
        self.failed: dict[str, str] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        result = yield
        if self.failed and (nextitem is None or nextitem.nodeid not in self.first):
            item.session.shouldstop = "caught"
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid not in self.failed:
            self.failed[report.nodeid] = " ".join(str(report.longrepr).split())[-300:]
            self._write()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed["collection"] = str(report.longrepr)[-300:]
            self._write()

    def _write(self) -> None:
        # At once: a mutant that hangs or dies leaves what was found before.
        self.file.write_text(json.dumps(self.failed), encoding="utf-8")
