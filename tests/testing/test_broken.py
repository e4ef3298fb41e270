"""Every broken engine fails the requirements that its defect is about, for the reason that the report gives."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from broken.plugin import ROLLOUT, SHARDING, TRAIN, Defect

from rlsdk.testing.report import Outcome, SuiteReport, read_reports

HERE = Path(__file__).parent
TIMEOUT_S = 2400.0
BROKEN = {"rollout": ROLLOUT, "train": TRAIN, "sharding manager": SHARDING}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Mapping[tuple[str, str], SuiteReport]:
    """Kind and backend -> what its suite found."""
    found: dict[tuple[str, str], SuiteReport] = {}
    folder = tmp_path_factory.mktemp("broken")
    # Two processes at a time: all engines together are minutes of work.
    with ThreadPoolExecutor(2) as pool:
        for reported in pool.map(
            lambda kind: run_suites(kind, folder / f"{kind}.json"), ("ROLLOUT", "TRAIN", "SHARDING")
        ):
            found |= {(suite.kind, suite.backend): suite for suite in reported}
    return found


def run_suites(kind: str, report: Path) -> list[SuiteReport]:
    """Runs the suites of one kind of engine, in a process of their own."""
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", str(HERE / "broken" / "suites.py"), "-c", os.devnull, "-q", "--no-summary",
            "-p", "no:cacheprovider", "--rootdir", str(HERE), "-k", f"Test_{kind}", "--rlsdk-report", str(report),
        ],
        env={**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert report.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    return read_reports([report])


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize(
    ("kind", "name", "defect"),
    [(kind, name, defect) for kind, defects in BROKEN.items() for name, defect in defects.items()],
)
def test_a_defect_fails_its_requirements(
    reports: Mapping[tuple[str, str], SuiteReport], kind: str, name: str, defect: Defect
) -> None:
    findings = reports[kind, name].findings
    failed = {f.name: f.message for f in findings if f.outcome in (Outcome.FAILED, Outcome.NOT_RUN)}
    assert failed.keys() >= defect.fails.keys(), failed
    for requirement, reason in defect.fails.items():
        assert reason in failed[requirement]
