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
`tests/testing/test_broken.py` runs the requirements that are named here on it: it must fail them all, with these words
in the reason. It may fail others, too: `RLSDK_BROKEN=all` in the environment runs the whole suites.

These engines are known to the kit, so that it catches them says little of the next one. What does is a trial:
engines that somebody writes from the interfaces alone, after bugs that trackers of real engines report, against a kit
that is frozen meanwhile. Of the 31 of the newest trial (2026-11-26) it caught 19: 61 %, where it aims at 95 % (rollout
14 of 16, train 3 of 10, sharding 2 of 5). The ones before it gave 78 % (21 of 27), 67 % (28 of 42), 66 % (19 of 29),
83 % (29 of 35), 66 % (25 of 38), 93 % (25 of 27), 74 % (28 of 38), 74 %, 87 %, 67 of the 72 that were decided, and 47
of 63. Authors are asked not to repeat the defects of earlier trials, so that each trial has rarer ones: of the newest,
those that passed leave a process that the first stop string started, do not check the token behind a recomputation for
a stop, count steps in bfloat16, make an objective's exception again, read a folder's name as a pattern, run objectives
in autocast, share one pool of offloaded weights between engines, leave swap files, ignore `timeout_s`, take it as the
time of a whole transfer, do not check weights of a source that has died, and keep receipts of a sync that failed.
Requirements were then added for all twelve. Updates that are refused until a call has returned stay allowed, since no
trainer makes them and simple engines refuse them. Not looked at yet are, of earlier trials: float32 buffers of a
mixture that an export rounds; and a norm that is wrong only under an option of one backend.

Another way to look for holes needs nobody's imagination: `make mutants` makes one small change, drawn by a seed, in a
copy of a right engine's sources (a comparison, an off-by-one, a removed statement, swapped branches, ...), runs the
engine's suite on it and says which requirement saw it. What survives is read: many such changes are no defect
(a size of a buffer, a sum in another order), and the rest are holes.
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
        module, _, engine = defect.place.partition(":")
        what = " ".join(getattr(import_module(module), engine).__doc__.partition("\n\n")[0].split())
        reasons = "; ".join(dict.fromkeys(defect.fails.values()))
        yield f"| {name} | {what} | {', '.join(f'`{failed}`' for failed in defect.fails)} | {reasons} |"


if __name__ == "__main__":
    main()
