"""Every metric that a run writes is explained in docs/metrics.md."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "metrics.md"
AREAS = ("reward", "response", "policy", "parity", "mismatch", "critic", "rollout", "schedule", "teacher", "time",
         "throughput", "sync", "data", "eval", "sft")  # fmt: skip
SOURCE = "eval/X"
"""Where a group comes from: no metric."""


def explained() -> list[re.Pattern[str]]:
    """Names of the page, capitals standing for anything. `area/NAME` alone stands for names of the user's own only."""
    names = re.findall(r"`([a-z_]+/[^` ]+)`", PAGE.read_text())
    return [re.compile(re.sub(r"[A-Z]+", "[^ ]+", re.escape(name))) for name in names]


def literals(file: Path) -> Iterator[str]:
    """Strings of a module that look like a metric's name; what is filled in is `X`."""
    for node in ast.walk(ast.parse(file.read_text())):
        text = ""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        elif isinstance(node, ast.JoinedStr):
            text = "".join(str(p.value) if isinstance(p, ast.Constant) else "X" for p in node.values)
        if (
            re.fullmatch(rf"(?:{'|'.join(AREAS)})/[A-Za-z_@0-9/]+", text)
            and not text.endswith(("_", "/"))
            and text != SOURCE
        ):
            yield text


def test_every_name_in_the_trainer_s_source_is_on_the_page() -> None:
    patterns = explained()
    found = {(name, file.name) for file in (ROOT / "rlsdk" / "trainer").rglob("*.py") for name in literals(file)}
    assert len({name for name, _ in found}) > 40
    assert sorted(one for one in found if not any(p.fullmatch(one[0]) for p in patterns)) == []


def test_every_name_of_a_real_run_is_on_the_page() -> None:
    recorded = json.loads((ROOT / "tests" / "trainer" / "recorded" / "quickstart.json").read_text())
    names = {name for line in (*recorded["sft"], recorded["eval"], *recorded["steps"]) for name in line} - {"step"}
    assert len(names) > 20
    patterns = explained()
    assert sorted(name for name in names if not any(p.fullmatch(name) for p in patterns)) == []


def test_a_name_that_nobody_wrote_down_would_be_found() -> None:
    """The patterns for names of a user's own must not swallow everything."""
    patterns = explained()
    for name in ("throughput/new", "schedule/new", "sync/new", "critic/new", "parity/new", "response/new", "data/new"):
        assert not any(p.fullmatch(name) for p in patterns), name
