"""The same numbers as one process of plain torch, for every split and cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from comparing import EXACT, LOG_PROBS, compare, good, reference
from worlds import Case

SIZES = (2, 1, 4)
"""The second world saves what the others load."""


def names(world: int) -> list[str]:
    """Of all cases that end in the numbers of one process; built without models, for the list alone."""
    import cases

    build = {1: cases.alone, 2: cases.pair, 4: cases.four}[world]
    from collections import defaultdict
    from pathlib import Path

    return [case.name for case in build(defaultdict(str), Path())]


@pytest.mark.parametrize(("world", "name"), [(world, name) for world in SIZES for name in names(world)])
def test_outputs_losses_gradient_norms_and_parameters_equal_one_process(
    world: int, name: str, worlds: Mapping[int, list[Case]], results: Any
) -> None:
    case = next(case for case in worlds[world] if case.name == name)
    difference = compare(results[world, name], reference(case))
    print(f"{world} x {name}: {difference}")
    assert difference.before <= LOG_PROBS * 2
    assert difference.loss <= EXACT
    assert difference.norm <= EXACT
    assert difference.parameter <= EXACT
    assert difference.after <= EXACT


@pytest.mark.parametrize(
    ("world", "name"),
    [(2, "tp2"), (2, "tp2 sp"), (2, "pp2"), (2, "vpp2"), (2, "dp2"), (4, "tp2 pp2"), (4, "tp2 dp2")],
)
def test_the_gradient_norm_counts_parts_once_each_and_copies_once(
    world: int, name: str, worlds: Mapping[int, list[Case]], results: Any
) -> None:
    """Log-probs would be right all the same: only clipping would go wrong, in silence."""
    case = next(case for case in worlds[world] if case.name == name)
    expected = reference(case)["norms"]
    assert max(expected) > 1.0, "the limit clips"
    for rank in good(results[world, name]):
        assert rank["norms"] == pytest.approx(expected, rel=EXACT)


def test_passes_are_counted_alike_on_all_ranks(results: Any) -> None:
    by_tokens = good(results[2, "dp2 by tokens"])
    assert [rank["micro_batches"] for rank in by_tokens] == [by_tokens[0]["micro_batches"]] * 2
    assert min(by_tokens[0]["micro_batches"]) >= 2
    assert good(results[2, "dp2"])[0]["micro_batches"] == [1, 1, 1]
    # Interleaved stages need whole rounds.
    assert good(results[2, "vpp2"])[0]["micro_batches"] == [2, 2, 2]
