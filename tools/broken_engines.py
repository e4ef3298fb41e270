"""Writes docs/broken_engines.md from `tests/testing/broken/`: the defects that the conformance suites are tested with.

`--check` writes nothing and fails where the page is not what the engines say.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "broken_engines.md"
HEAD = """# Broken engines, and what catches them

Written by `make compatibility` from `tests/testing/broken/`. Each engine is right except for one defect.
`tests/testing/broken_runs.py` runs the requirements that are named here on it: it must fail them all, with these words
in the reason. It may fail others, too: `RLSDK_BROKEN=all` in the environment runs the whole suites.

At most three defects stand here for a requirement: they show that it can fail. How many unknown defects the kit sees
was measured with engines that their authors wrote from the interfaces alone, against a kit that did not change
meanwhile: of 273 likely slips, sampled over the families of defects in six trials, it caught 251 (92 %; 93 % in the
last two). Of rarer bugs, like those that trackers report of real engines, it caught about three in four (308 of 402).

`make mutants` needs nobody's imagination: it makes one small change, drawn by a seed, in a copy of a right engine's
sources, runs the engine's suite on it and says which requirement saw it.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    page = "\n".join(lines())
    if not args.check:
        PAGE.write_text(page, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page:
        sys.exit("docs/broken_engines.md is not what tests/testing/broken/ says; run `make compatibility`")


def lines() -> Iterator[str]:
    """The page, line by line."""
    sys.path.insert(0, str(ROOT / "tests" / "testing"))
    plugin = import_module("broken.plugin")
    yield HEAD
    for title, defects in (
        ("Rollout engines", plugin.ROLLOUT),
        ("Train engines", plugin.TRAIN),
        ("Sharding managers", plugin.SHARDING),
    ):
        yield f"## {title}: {len(defects)}"
        yield ""
        yield from table(defects)
        yield ""


def table(defects: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong, and each requirement that says so with words of its reason."""
    yield "| engine | defect | fails | because |"
    yield "|---|---|---|---|"
    for name, defect in defects.items():
        what = " ".join(defect.engine.__doc__.partition("\n\n")[0].split())
        reasons = "; ".join(dict.fromkeys(defect.fails.values()))
        yield f"| {name} | {what} | {', '.join(f'`{failed}`' for failed in defect.fails)} | {reasons} |"


if __name__ == "__main__":
    main()
