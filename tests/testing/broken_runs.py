"""Runs broken engines through their suites: all, or those that a landing has to run (`ZOO_SINCE`) and has time for
(`ZOO_MOST`)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

import pytest
from broken.defect import MANAGER, Defect
from broken.plugin import ROLLOUT, SHARDING, TRAIN

from rlsdk.testing.suites.report import Outcome, SuiteReport, read_reports

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tools"))
from landing.changes import find_parent, head_of  # noqa: E402
from landing.zoo import Broken, Selection, draw, select  # noqa: E402

TIMEOUT_S = 2400.0
BROKEN: Mapping[str, Mapping[str, Defect]] = MappingProxyType({"rollout": ROLLOUT, "train": TRAIN, MANAGER: SHARDING})
"""Kind, as reports name it -> the broken engines of it."""
SINCE = os.environ.get("ZOO_SINCE", "")
"""Commit before the landing; empty: all engines run."""
MOST = int(os.environ.get("ZOO_MOST") or sys.maxsize)
"""Most engines that run of the kinds of one file."""


@cache
def selection() -> Selection:
    """The broken engines that this landing runs, of all kinds."""
    engines = [_broken(kind, name) for kind, defects in BROKEN.items() for name in defects]
    return select(ROOT, engines, find_parent(ROOT, SINCE))


def _broken(kind: str, name: str) -> Broken:
    defect = BROKEN[kind][name]
    return Broken(kind, name, frozenset(defect.fails), defect.engine.__module__)


@cache
def chosen(*kinds: str) -> list[tuple[str, str]]:
    """Kind and name of each broken engine that runs. If there is no time for all, others stay out for each commit."""
    every = [(kind, name) for kind in kinds for name in BROKEN[kind]]
    found = [one for one in every if not SINCE or _broken(*one) in selection().chosen]
    commit = head_of(ROOT)
    kept = set(sorted(found, key=lambda one: draw(commit, _broken(*one)))[:MOST])
    return [one for one in found if one in kept]


def left_out(*kinds: str) -> Iterator[str]:
    """What `tools/run_tests.py` reads of those that do not run."""
    ran, late = Counter(kind for kind, _ in chosen(*kinds)), len(chosen(*kinds)) == MOST
    for kind in kinds:
        if number := len(BROKEN[kind]) - ran[kind]:
            why = f"of all, {selection().why}{f'; there was time for {MOST}' if late else ''}"
            yield f"LEFT OUT: {number} of {len(BROKEN[kind])} broken engines ({kind}): {why}"


def asked_for(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """Kind -> names of the broken engines whose tests this session runs."""
    found: dict[str, list[str]] = {}
    for item in request.session.items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if {"kind", "name"} <= params.keys():
            found.setdefault(params["kind"], []).append(params["name"])
    return found


def run_suites(kind: str, names: Collection[str], report: Path) -> dict[tuple[str, str], SuiteReport]:
    """What the suites of these engines of one kind found, in a process of their own."""
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RLSDK_BROKEN_NAMES": ",".join(names)}
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", str(HERE / "broken" / "suites.py"), "-c", os.devnull, "-q", "--no-summary",
            "-p", "rlsdk.testing.plugin", "-p", "no:cacheprovider", "--rootdir", str(HERE),
            "-k", f"Test_{kind.upper().replace(' ', '_')}",
            "--rlsdk-report", str(report),
        ],
        env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert report.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    return {(suite.kind, suite.backend): suite for suite in read_reports([report])}


def check(report: SuiteReport) -> None:
    """That the defect fails its requirements, for the reason that the report gives."""
    defect = BROKEN[report.kind][report.backend]
    failed = {f.name: f.message for f in report.findings if f.outcome in (Outcome.FAILED, Outcome.NOT_RUN)}
    assert failed.keys() >= defect.fails.keys(), failed
    for requirement, reason in defect.fails.items():
        assert reason in failed[requirement]
