"""The pytest plugin: collects the results of requirements. Imports only pytest and stdlib.

Sessions that want it name it: `pytest_plugins = ["rlsdk.testing.plugin"]` in a `conftest.py`, or `pytest -p
rlsdk.testing.plugin`. It has no entry point, so that other sessions where rlsdk is installed do not load it.
`pytest --rlsdk-report FILE` writes the report as JSON. A run that contains conformance suites ends with their tables.
`--rlsdk-basic BACKENDS` leaves all but the basic requirements of their suites out, and says so at the end.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlsdk.testing.suites.child_processes import OPTION, die_with_parent
from rlsdk.testing.suites.session import COLLECTOR

BASIC = "--rlsdk-basic"
SHARE = "--rlsdk-share"
"""Option of `rlsdk plugins check`: folder in which the processes of a run record the tests that they take."""
MARK = "rlsdk_requirement"
"""As in `rlsdk.testing.suites.requirements`, which is not imported if there is no suite."""
USABLE = "registration.usable"
"""The requirement that fails if a backend cannot be used at all; the others are then not run."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rlsdk")
    group.addoption("--rlsdk-report", metavar="FILE", type=Path, help="Write the conformance report as JSON.")
    group.addoption(
        BASIC, metavar="BACKENDS", default="", help="Run only the basic requirements of these backends' suites: a,b,c."
    )
    # Used by `rlsdk plugins check` for its child processes.
    group.addoption(OPTION, type=int, help=argparse.SUPPRESS)
    group.addoption(SHARE, metavar="FOLDER", type=Path, help=argparse.SUPPRESS)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{MARK}(name, needs): a requirement of a conformance suite.")
    collector = Collector(config)
    config.pluginmanager.register(collector, COLLECTOR)
    if (folder := config.getoption(SHARE)) is not None:
        from rlsdk.testing.suites.shared_runs import Share

        collector.share = Share(folder, MARK)
        config.pluginmanager.register(collector.share, "rlsdk-share")
    if (reading := config.getoption(OPTION)) is not None:
        die_with_parent(reading)


class Collector:
    """Receives pytest's events and records the tests that are requirements."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.items: dict[str, pytest.Item] = {}
        """Node id -> requirement, in the order in which they run."""
        self.phases: dict[str, list[Any]] = {}
        """Node id -> reports of its setup, call and teardown."""
        self.labs: dict[Any, Any] = {}
        """Suite -> lab that its requirements share, until it is closed."""
        self.share: Any = None
        """This process's share of a run by several processes (`rlsdk.testing.suites.shared_runs.Share`)."""
        self.unclosed: dict[Any, str] = {}
        """Suite -> why its lab could not be closed."""
        self.basic = frozenset(filter(None, config.getoption(BASIC).split(",")))
        """Backends of whose suites only the basic requirements run."""
        self.left_out: Counter[Any] = Counter()
        """Suite -> number of its requirements that are not basic and were left out for that."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Lets `-k` match the names of requirements in reports too; leaves out those that are not basic."""
        kept: list[pytest.Item] = []
        left_out: list[pytest.Item] = []
        for item in items:
            mark = item.get_closest_marker(MARK)
            if mark is not None:
                item.extra_keyword_matches.add(mark.args[0])
            suite: Any = getattr(item, "cls", None)
            is_left_out = mark is not None and suite.backend in self.basic and not mark.kwargs.get("basic")
            (left_out if is_left_out else kept).append(item)
        if left_out:
            items[:] = kept
            self.config.hook.pytest_deselected(items=left_out)
            self.left_out.update(getattr(item, "cls", None) for item in left_out)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = {item.nodeid: item for item in session.items if item.get_closest_marker(MARK) is not None}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """If a backend is not usable, one requirement fails and the others are not run."""
        mark, kind = item.get_closest_marker(MARK), getattr(item, "cls", None)
        if mark is not None and mark.args[0] != USABLE and getattr(kind, "why_unusable", str)():
            pytest.skip(f"no usable backend {kind.backend!r}: see {USABLE}")  # type: ignore[union-attr]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Any:
        """After a requirement, runs the general checks on all outputs of the engine."""
        fixtures = getattr(item, "funcargs", {}) if item.get_closest_marker(MARK) is not None else {}
        lab: Any = fixtures.get("rlsdk_lab")
        measured = fixtures.get("measured")
        if measured is None or not hasattr(lab, "verify"):
            return (yield)
        lab.forget()  # records of a requirement that failed
        result = yield
        lab.verify(measured)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Any:
        """Closes a suite's lab after its last test, so that its time does not count for any requirement."""
        goes_on = False
        try:
            result = yield
            goes_on = True
            return result
        finally:
            kind: Any = getattr(item, "cls", None)
            if not goes_on or getattr(nextitem, "cls", None) is not kind:
                self.close_lab(kind)

    def close_lab(self, kind: Any) -> None:
        """Closes the lab of a suite."""
        try:
            if (lab := self.labs.pop(kind, None)) is not None:
                if self.share is not None and hasattr(lab, "oracle"):
                    self.share.write_drawn(lab.oracle.drawn)
                lab.close()
        except Exception as error:
            self.unclosed[kind] = f"{type(error).__name__}: {error}"

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Any:
        report: Any = yield
        if item.nodeid in self.items:
            self.phases.setdefault(item.nodeid, []).append(report)
            if report.failed:
                item.stash[FAILED] = True
        return report

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        for kind in list(self.labs):
            self.close_lab(kind)
        if (worlds := sys.modules.get("rlsdk.testing.process.worlds")) is not None:
            worlds.close_process_pools()
        if self.unclosed and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        path: Path | None = self.config.getoption("--rlsdk-report")
        if path is not None and (self.phases or self.share is not None):
            from rlsdk.testing.suites.report import to_json

            path.write_text(to_json(self.suites()), encoding="utf-8")

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self) -> None:
        if self.phases or self.left_out:
            from rlsdk.testing.suites.report import print_report

            print_report(self.suites())

    def suites(self) -> list[Any]:
        """The reports, by suite."""
        from rlsdk.testing.suites.suite import suite_report

        found: dict[Any, list[Any]] = {suite: [] for suite in self.left_out}
        for name, item in self.items.items():
            kind: Any = item
            finding = _finding(item, self.phases.get(name, []))
            if self.share is not None:
                finding = self.share.labelled(name, finding)
            found.setdefault(kind.cls, []).append(finding)
        for suite, message in self.unclosed.items():
            found[suite].append(_not_closed(message))
        return [suite_report(suite, findings, left_out=self.left_out[suite]) for suite, findings in found.items()]


@pytest.fixture(scope="class")
def rlsdk_lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The lab that the requirements of one suite share while the suite runs."""
    lab = request.cls.make_lab(tmp_path_factory.mktemp("rlsdk"))
    collector: Any = request.config.pluginmanager.get_plugin(COLLECTOR)
    collector.labs[request.cls] = lab
    return lab


FAILED = pytest.StashKey[bool]()
"""Set on a requirement that failed, before its fixtures are torn down."""


def _finding(item: Any, phases: list[Any]) -> Any:
    from rlsdk.interfaces import INTERFACE_VERSION
    from rlsdk.testing.suites.report import Finding
    from rlsdk.testing.suites.requirements import NUMBERS

    mark = item.get_closest_marker(MARK)
    name, needs = mark.args
    callspec = getattr(item, "callspec", None)
    properties: Mapping[str, Any] = dict(item.user_properties)
    outcome, message = _outcome(phases)
    return Finding(
        name=f"{name}[{callspec.id}]" if callspec is not None else name,
        doc=" ".join((item.function.__doc__ or "").partition("\n\n")[0].split()),
        outcome=outcome,
        capability=needs.value if needs is not None else "",
        numbers=tuple(properties.get(NUMBERS, ())),
        message=message,
        is_new=mark.kwargs.get("since") == INTERFACE_VERSION,
        seconds=round(sum(phase.duration for phase in phases), 3),
    )


def _not_closed(message: str) -> Any:
    from rlsdk.testing.suites.report import Finding, Outcome

    doc = "What the requirements of a suite share (engines, processes) can be closed behind the last of them."
    return Finding(name="suite.close", doc=doc, outcome=Outcome.FAILED, message=message)


def _outcome(phases: list[Any]) -> tuple[Any, str]:
    from rlsdk.testing.suites.report import Outcome
    from rlsdk.testing.suites.requirements import NOT_CLAIMED

    for phase in phases:
        if phase.failed:
            crash = getattr(phase.longrepr, "reprcrash", None)
            said = crash.message if crash is not None else str(phase.longrepr)
            said = said.removeprefix("AssertionError: ")
            return Outcome.FAILED, said if phase.when == "call" else f"in {phase.when}: {said}"
        if phase.skipped:
            reason = phase.longrepr[2] if isinstance(phase.longrepr, tuple) else str(phase.longrepr)
            reason = reason.removeprefix("Skipped: ")
            return (Outcome.NOT_CLAIMED if reason.startswith(NOT_CLAIMED) else Outcome.NOT_RUN), reason
    if not any(phase.when == "call" for phase in phases):
        return Outcome.NOT_RUN, "the run ended before it"
    return Outcome.PASSED, ""
