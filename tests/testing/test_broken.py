"""Every broken engine fails the requirements that its defect is about, for the reason that the report gives."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from broken.defect import MANAGER, Defect
from broken.plugin import ROLLOUT, SHARDING, TRAIN

from rlsdk.testing.suites.report import Outcome, SuiteReport, read_reports

HERE = Path(__file__).parent
TIMEOUT_S = 2400.0
FEW = 20
"""Engines of a kind; more are run with all others of it."""
KINDS = {"rollout": "ROLLOUT", "train": "TRAIN", MANAGER: "SHARDING_MANAGER"}
BROKEN = {"rollout": ROLLOUT, "train": TRAIN, MANAGER: SHARDING}


@pytest.fixture(scope="module")
def reports(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[tuple[str, str], SuiteReport]:
    """Kind and backend -> what its suite found; of the backends whose tests were asked for."""
    found: dict[tuple[str, str], SuiteReport] = {}
    folder = tmp_path_factory.mktemp("broken")
    asked = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    names = {(params["kind"], params["name"]) for params in asked if {"kind", "name"} <= params.keys()}
    # Two processes at a time: all engines together are minutes of work.
    with ThreadPoolExecutor(2) as pool:
        for reported in pool.map(
            lambda kind: run_suites(kind, [name for of, name in names if KINDS[of] == kind], folder / f"{kind}.json"),
            sorted({KINDS[kind] for kind, _ in names}),
        ):
            found |= {(suite.kind, suite.backend): suite for suite in reported}
    return found


def run_suites(kind: str, names: Collection[str], report: Path) -> list[SuiteReport]:
    """Runs the suites of these engines of one kind, in a process of their own."""
    classes = " or ".join(f"Test_{kind}_{name}" for name in names) if len(names) < FEW else f"Test_{kind}"
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", str(HERE / "broken" / "suites.py"), "-c", os.devnull, "-q", "--no-summary",
            "-p", "no:cacheprovider", "--rootdir", str(HERE), "-k", classes, "--rlsdk-report", str(report),
        ],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
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
