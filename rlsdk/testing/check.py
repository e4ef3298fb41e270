"""Runs the conformance suite of a backend without a test file: generates the file that an author would write, and runs
pytest on it in a separate process."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from rlsdk.interfaces import BackendKind, ConfigError, RlsdkError, nearest
from rlsdk.registry import Registry
from rlsdk.testing.plugin import BASIC, SHARE
from rlsdk.testing.suites.child_processes import run_children
from rlsdk.testing.suites.kinds import kinds_of
from rlsdk.testing.suites.renamed import check_expression
from rlsdk.testing.suites.report import SuiteReport, read_reports
from rlsdk.testing.suites.session import PLUGIN
from rlsdk.testing.suites.shared_runs import join_reports

SUITES: Mapping[BackendKind, str] = {
    BackendKind.TRAIN: "TrainConformance",
    BackendKind.ROLLOUT: "RolloutConformance",
}
FILE = '''"""The conformance suite of {backend!r}."""

from rlsdk.testing import {suite}


class TestConformance({suite}):
    backend = {backend!r}
{settings}'''

MOST_PROCESSES = 4
"""More would wait for the longest group of requirements, which stay together (`rlsdk.testing.suites.shared_runs`)."""
NOTHING_RAN = 5
"""pytest's exit codes for: no test was collected, or `-k` selected none."""


def check_backend(
    name: str,
    *,
    kind: BackendKind | None = None,
    settings: Mapping[str, object] | None = None,
    only: str = "",
    basic: bool = False,
    verbose: bool = False,
    processes: int | None = None,
) -> list[SuiteReport]:
    """Runs every suite for the backends with this name.

    Args:
        name: name of a backend. If a train and a rollout backend share it, both are run.
        kind: runs only the backend of this kind.
        settings: attributes of the suite class: `options`, `model`, `device`, `tp_size`, ...
        only: names of requirements or parts of them, as for pytest's `-k`.
        basic: runs only the requirements that are marked as basic.
        verbose: shows pytest's own output too.
        processes: number of processes that run a suite together, each with its own engines. None: up to four on a CPU
            that has a core for each worker of each, if the whole suite is run and its output is not shown; otherwise
            one.

    Raises:
        PluginError: no usable backend has this name.
        ConfigError: a suite has no such setting, or `only` matches no requirement or has an old name of one, or
            `basic` is given with it.
        RlsdkError: the run ended without a report.
    """
    kinds = kinds_of(name, kind)
    if basic and only:
        raise ConfigError(f"--basic and --only {only!r} both choose requirements; give one of them")
    check_expression(only)
    for found in kinds:
        _known(found, settings or {})
    if processes is None:
        processes = 1 if only or verbose else _most_processes(settings or {})
    with tempfile.TemporaryDirectory(prefix="rlsdk-check-") as folder:
        reports = []
        for found in kinds:
            file = Path(folder) / f"test_{found.value}.py"
            body = "".join(f"    {key} = {value!r}\n" for key, value in (settings or {}).items())
            file.write_text(FILE.format(backend=name, suite=SUITES[found], settings=body), encoding="utf-8")
            chosen = [*(["-k", only] if only else []), *([BASIC, name] if basic else [])]
            report = _run(file, chosen, verbose, _python(name, found), processes)
            reports += [] if report is None else [report]
        if not reports:
            raise ConfigError(
                f"--only {only!r}: no requirement of {name!r} goes by that; expected names as reports have them, or "
                f"parts of them: --only 'update or stop'. Without it all are run: rlsdk plugins check {name}"
            )
        return reports


def _most_processes(settings: Mapping[str, object]) -> int:
    """Processes for a suite: tensor-parallel workers that wait for each other keep a core each busy."""
    num_workers = int(str(settings.get("tp_size", 1)))
    if settings.get("device", "cpu") != "cpu":
        return 1
    return min(max((os.cpu_count() or 1) // num_workers, 1), MOST_PROCESSES)


def _known(kind: BackendKind, settings: Mapping[str, object]) -> None:
    from rlsdk.testing.rollout.settings import RolloutSettings
    from rlsdk.testing.suites.suite import settings_of
    from rlsdk.testing.train.settings import TrainSettings

    known = settings_of(TrainSettings if kind is BackendKind.TRAIN else RolloutSettings)
    for name in settings:
        if name not in known:
            raise ConfigError(
                f"{SUITES[kind]} has no setting {name!r}{nearest(name, known)}; expected one of {sorted(known)}"
            )


def _python(name: str, kind: BackendKind) -> str:
    """The interpreter that can import a backend: this one, or the one of the backend's own environment."""
    registry = Registry.discover()
    isolation = registry.isolation(registry.backend(kind, name))
    return isolation.python if isolation else sys.executable


def _run(file: Path, chosen: Sequence[str], verbose: bool, python: str, processes: int) -> SuiteReport | None:
    """The report of one file, run by `processes` processes of the interpreter; None: nothing in it was chosen."""
    # The run has its own folder, so that it does not read the caller's configuration.
    (file.parent / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    taken = file.with_suffix("")
    taken.mkdir()
    command = [
        python, "-m", "pytest", str(file), "-c", str(file.parent / "pytest.ini"),
        "-p", PLUGIN, "-p", "no:cacheprovider",
        *(["-v"] if verbose else ["-qq", "--no-summary"]), *chosen,
    ]  # fmt: skip
    reports = [file.with_suffix(f".{at}.json") for at in range(processes)]
    commands = [[*command, "--rlsdk-report", str(report)] for report in reports]
    environment = dict(os.environ)
    if processes > 1:
        commands = [[*one, SHARE, str(taken)] for one in commands]
        environment.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // processes, 1)))
    with ExitStack() as stack:
        outputs = [
            None if verbose else stack.enter_context(report.with_suffix(".txt").open("w+", encoding="utf-8"))
            for report in reports
        ]
        start = time.monotonic()
        codes = run_children(commands, file.parent, outputs, environment)
        seconds = round(time.monotonic() - start, 1)
        if chosen and set(codes) == {NOTHING_RAN}:
            return None
        for code, report, output in zip(codes, reports, outputs, strict=True):
            if not report.exists():
                said = ""
                if output is not None:
                    output.seek(0)
                    said = f":\n{output.read()[-6000:]}"
                raise RlsdkError(f"the conformance run of {file.stem} ended with {code} and no report{said}")
    found = read_reports(reports)
    return replace(join_reports(found, taken) if processes > 1 else found[0], seconds=seconds)
