"""Runs one suite in several processes: each repeatedly takes a group of requirements that no other process has taken.

A group contains the requirements of one module of the kit, or those that need several ranks, so that engines that start
slowly start once per group.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlsdk.testing.suites.report import Finding, Outcome, SuiteReport

ELSEWHERE = "another process of this run took it"
"""Message of a requirement in the report of a process that did not run it."""
DRAWN = "-drawn.json"
"""Suffix of the files in which processes record the tokens of seeds."""
SEEDS = "suite.seeds"
"""Name of the finding for a shared run whose processes disagree, which no process can see alone."""
MOST_BY_ROUNDING = 1
"""As in `rollout_oracle`: number of seeded samples that may differ."""


class Share:
    """The part of one process in a shared run; as a pytest plugin it skips requirements that other processes took."""

    def __init__(self, folder: Path, mark: str) -> None:
        self.folder, self.mark = folder, mark
        self.taken: dict[str, bool] = {}
        """Group -> whether this process has it."""
        self.elsewhere: set[str] = set()
        """Node ids of requirements that other processes run."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        marker = item.get_closest_marker(self.mark)
        if marker is None or self._takes(_group_of(item, marker.args[1])):
            return None
        self.elsewhere.add(item.nodeid)
        return True

    def labelled(self, name: str, finding: Finding) -> Finding:
        """The finding of this requirement, or a placeholder if another process runs it."""
        return replace(finding, message=ELSEWHERE) if name in self.elsewhere else finding

    def write_drawn(self, drawn: Mapping[Any, Sequence[int]]) -> None:
        """Records the tokens of seeds in this process (`rollout_oracle.Oracle.drawn`)."""
        pairs = [[key, text] for key, text in drawn.items()]
        (self.folder / f"{os.getpid()}{DRAWN}").write_text(json.dumps(pairs), encoding="utf-8")

    def _takes(self, group: str) -> bool:
        if group not in self.taken:
            try:
                (self.folder / group).touch(exist_ok=False)
                self.taken[group] = True
            except FileExistsError:
                self.taken[group] = False
        return self.taken[group]


def _group_of(item: Any, needs: Any) -> str:
    """Group of a requirement. Those about several ranks share processes, which start slowly."""
    if needs is not None and (needs.value.endswith("parallel") or needs.value in ("sharded_update", "reshard_on_load")):
        return f"{item.cls.__name__}-ranks"
    return f"{item.cls.__name__}-{item.function.__module__}"


def join_reports(reports: Sequence[SuiteReport], folder: Path) -> SuiteReport:
    """Joins the reports of all processes, which list the same requirements in the same order.

    Args:
        reports: reports of the same suite, by process.
        folder: folder in which the processes recorded what they took.
    """
    found: dict[str, Finding] = {}
    for report in reports:
        for finding in report.findings:
            if finding.message != ELSEWHERE or finding.name not in found:
                found[finding.name] = finding
    if other := _other_tokens(sorted(folder.glob(f"*{DRAWN}"))):
        doc = "The same seed gives the same tokens in every process that had a share in this run."
        message = f"seeds that gave other tokens in another process: {len(other)}: {'; '.join(other[:3])}"
        found[SEEDS] = Finding(name=SEEDS, doc=doc, outcome=Outcome.FAILED, message=message)
    return replace(reports[0], findings=tuple(found.values()))


def _other_tokens(drawn: Sequence[Path]) -> list[str]:
    """Seeded samples that differ between processes; none if only one differs, because rounding may decide it."""
    known: dict[str, list[int]] = {}
    other: list[str] = []
    for file in drawn:
        for key, text in json.loads(file.read_text(encoding="utf-8")):
            name = json.dumps(key)
            before = known.setdefault(name, text)
            shared = min(len(before), len(text))
            if before[:shared] != text[:shared]:
                other.append(name)
            elif len(text) > len(before):
                known[name] = text
    return other if len(other) > MOST_BY_ROUNDING else []
