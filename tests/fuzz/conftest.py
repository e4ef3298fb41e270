"""Properties that are tried on inputs by the hundred, and by the thousand in `python -m benchmarks.campaign`."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

EXAMPLES = int(os.environ.get("RLSDK_FUZZ_EXAMPLES", "60"))
"""Of each property; `make test` has two minutes for all of them."""
FUZZ = settings(max_examples=EXAMPLES, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck))
WHAT = pytest.StashKey[str]()
_tried: Counter[str] = Counter()
_failed: set[str] = set()


@pytest.fixture
def tried(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Counts one input of a property, by the property's name in the table."""

    def count(what: str) -> None:
        request.node.stash[WHAT] = what
        _tried[what] += 1

    return count


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.failed and WHAT in item.stash:  # type: ignore[attr-defined]
        _failed.add(item.stash[WHAT])
    return report  # type: ignore[return-value]


def pytest_sessionfinish() -> None:
    if file := os.environ.get("RLSDK_FUZZ_TRIED"):
        found = {what: {"inputs": number, "held": what not in _failed} for what, number in _tried.items()}
        Path(file).write_text(json.dumps(found), encoding="utf-8")
