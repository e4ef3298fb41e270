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
engines that somebody writes from the interfaces alone, against a kit that is frozen meanwhile; it aims at 95 %. Authors
are asked not to repeat the defects of earlier trials. Two kinds of trial were made.

*By family.* Slips that are likely in practice, sampled evenly from the families of defects (distribution, length,
company, lifetime, models, several ranks, transfers of weights); in all trials but the first a random generator chose
among the authors' candidates. All on 2026-11-26:

| trial | rollout | train | sharding | together |
|---|---|---|---|---|
| 1 | 24 of 24 | 20 of 21 | 5 of 6 | 49 of 51, 96 % |
| 2 | 19 of 20 | 13 of 15 | 6 of 9 | 38 of 44, 86 % |
| 3 | 14 of 16 | 15 of 15 | 8 of 9 | 37 of 40, 92 % |
| 4 | 14 of 16 | 14 of 16 | 13 of 14 | 41 of 46, 89 % |
| 5 | 14 of 16 | 16 of 16 | 13 of 14 | 43 of 46, 93 % |
| 6 | 15 of 16 | 16 of 16 | 12 of 14 | 43 of 46, 93 % |

The 22 that passed draw with 16 bits among 131,072 tokens, add up a nucleus in float16, look for stop strings in
128 tokens, share the mask of rows with equal tokens, link a checkpoint to an older one, name a language model in the
export of a value model, raise one error for all failures of a sync, do not compare the engines' own checksums, keep the
handles of ranks that were started anew, count quantized tensors by replica, refuse receipts that name more, count
pauses, draw without the rank, keep the optimizer of each reset, take settings that were refused, keep plans by the
identity of a list, forget an abort at the next resume, keep four versions of a sample, compare tied copies of
another dtype, keep the model of a closed engine, refuse replicas of two dtypes, and take a column for a vector. All 22
fail today.

*After trackers.* Bugs that were reported of real engines, or subtle slips of porting, each rarer than those before: 19
of 31 (2026-11-26), and before it 21 of 27, 28 of 42, 19 of 29, 29 of 35, 25 of 38, 25 of 27, 28 of 38, 74 %, 87 %, 67
of the 72 that were decided, and 47 of 63. What passed fails today, with two exceptions: updates that are refused
until a call has returned stay allowed, since no trainer makes them and simple engines refuse them; a norm that is
wrong only under an option of one backend is not looked at.

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
