"""Every broken engine fails the requirement that its defect is about, for the reason that the report gives, and no
other; every engine of our own passes all that it claims."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from broken.plugin import ROLLOUT, Defect

from rlsdk.testing.report import Outcome, SuiteReport, read_reports

HERE = Path(__file__).parent
TIMEOUT_S = 900.0


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, SuiteReport]:
    """Backend -> what its suite found; all of them in one process."""
    report = tmp_path_factory.mktemp("broken") / "report.json"
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", str(HERE / "broken" / "suites.py"), "-c", os.devnull, "-q", "--no-summary",
            "-p", "no:cacheprovider", "--rootdir", str(HERE), "--rlsdk-report", str(report),
        ],
        env={**os.environ, "PYTHONPATH": str(HERE)}, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert report.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    return {suite.backend: suite for suite in read_reports([report])}


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("name", ROLLOUT)
def test_a_defect_fails_its_requirement_and_no_other(reports: Mapping[str, SuiteReport], name: str) -> None:
    defect: Defect = ROLLOUT[name]
    failed = {f.name: f.message for f in reports[name].findings if f.outcome in (Outcome.FAILED, Outcome.NOT_RUN)}
    assert failed.keys() == defect.fails.keys(), failed
    for requirement, reason in defect.fails.items():
        assert reason in failed[requirement]
