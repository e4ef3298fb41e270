"""Every broken rollout engine fails the requirements that its defect is about, for the reason that the report gives."""

from __future__ import annotations

from collections.abc import Mapping

import broken_runs
import pytest

from rlsdk.testing.suites.report import SuiteReport


@pytest.fixture(scope="module")
def reports(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[tuple[str, str], SuiteReport]:
    """What the suite of each broken engine found, of those whose tests were asked for."""
    found: dict[tuple[str, str], SuiteReport] = {}
    for kind, names in broken_runs.asked_for(request).items():
        found |= broken_runs.run_suites(kind, names, tmp_path_factory.mktemp("broken") / "report.json")
    return found


@pytest.mark.timeout(broken_runs.TIMEOUT_S)
@pytest.mark.parametrize(("kind", "name"), broken_runs.chosen("rollout"))
def test_a_defect_fails_its_requirements(reports: Mapping[tuple[str, str], SuiteReport], kind: str, name: str) -> None:
    broken_runs.check(reports[kind, name])
