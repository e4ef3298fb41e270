"""The same numbers as one process of plain torch, for every split and cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import precise
import pytest
import torch
from comparing import EXACT, LOG_PROBS, by_row, compare, good, reference
from worlds import Case

SPECIAL = {"bfloat16 tp2", "bfloat16 dp2", "skipped", "failed", "frozen", "reset", "reset bfloat16",
           "reset bfloat16 whole", "two roles", "kwargs", "damaged", "offloaded",
           "adapter bfloat16", "adapter probe", "export in parts", "export of experts", "opened"}  # fmt: skip
SIZES = (2, 1, 4)
"""The second world saves what the others load."""


def names(world: int) -> list[str]:
    """Of all cases that end in the numbers of one process; built without models, for the list alone."""
    import cases

    build = {1: cases.alone, 2: cases.pair, 4: cases.four}[world]
    from collections import defaultdict
    from pathlib import Path

    return [case.name for case in build(defaultdict(str), Path()) if case.name not in SPECIAL]


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


@pytest.mark.parametrize(
    ("world", "name"),
    [(1, "all rows"), (2, "tp2"), (2, "tp2 sp"), (2, "pp2"), (2, "vpp2"), (2, "dp2"), (2, "cp2"),
     (2, "odd vocabulary tp2"), (4, "tp2 pp2"), (4, "tp4")],
)  # fmt: skip
def test_log_probs_are_as_near_to_float64_as_those_of_transformers(
    world: int, name: str, worlds: Mapping[int, list[Case]], results: Any
) -> None:
    """Two float32 engines can differ by both their errors. Each log-prob, of up to 8.5, ends in steps of 1e-6."""
    case = next(case for case in worlds[world] if case.name == name)
    truth, plain = (precise.log_probs(case.model, precise=exact) for exact in (True, False))
    ranks = [rank for rank in good(results[world, name]) if rank["collector"]]
    error = max(precise.root_mean_square(by_row(rank, "before", "log_probs"), truth) for rank in ranks)
    allowed = precise.root_mean_square(plain, truth)
    print(f"{world} x {name}: root mean square {error:.2e}, transformers {allowed:.2e}")
    assert error <= LOG_PROBS
    assert error <= 2 * allowed


@pytest.mark.parametrize("name", ["bfloat16 tp2", "bfloat16 dp2"])
def test_bfloat16_stays_near_float32(name: str, results: Any) -> None:
    low, high = good(results[2, name]), good(results[2, "dp2 whole optimizer"])
    exact = {row: t for rank in high for row, t in by_row(rank, "before", "log_probs").items()}
    found = {row: t for rank in low if rank["collector"] for row, t in by_row(rank, "before", "log_probs").items()}
    assert low[0]["norms"] == pytest.approx(low[1]["norms"], rel=1e-6)
    differences = [float((found[row] - exact[row]).abs().max()) for row in exact]
    assert 0 < max(differences) < 0.1
    assert {meta.dtype for meta in low[0]["layout"].tensors} == {"bfloat16"}


def test_passes_are_counted_alike_on_all_ranks(results: Any) -> None:
    by_tokens = good(results[2, "dp2 by tokens"])
    assert [rank["micro_batches"] for rank in by_tokens] == [by_tokens[0]["micro_batches"]] * 2
    assert min(by_tokens[0]["micro_batches"]) >= 2
    assert good(results[2, "dp2"])[0]["micro_batches"] == [1, 1, 1]
    # Interleaved stages need whole rounds.
    assert good(results[2, "vpp2"])[0]["micro_batches"] == [2, 2, 2]


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_on_all(results: Any) -> None:
    for rank in good(results[2, "skipped"]):
        assert rank["bad"].skipped
        assert rank["unchanged"]
        assert not rank["good"].skipped
        assert rank["good"] == rank["expected"]
        assert rank["same"]


def test_what_the_objective_raises_on_the_last_stage_is_raised_on_all_and_leaves_nothing_behind(results: Any) -> None:
    first, last = good(results[2, "failed"])
    assert isinstance(last["failure"], ArithmeticError)
    assert "objective failed on rank 1: ArithmeticError: no loss" in str(first["failure"])
    for rank in (first, last):
        assert rank["good"] == rank["expected"]


def test_a_new_optimizer_starts_its_schedule_and_moments_afresh(results: Any) -> None:
    for rank in good(results[2, "reset"]):
        assert rank["kept"]
        assert rank["lr"] == pytest.approx(1e-2 / 4)
        # Adam's first step is at most the learning rate; with old moments it would be another.
        assert 0 < rank["moved"] <= rank["lr"] * 1.01


@pytest.mark.parametrize("name", ["reset bfloat16", "reset bfloat16 whole"])
def test_a_new_optimizer_keeps_the_bits_that_bfloat16_weights_lack(name: str, results: Any) -> None:
    for rank in good(results[2, name]):
        assert rank["finer"], "copies hold more than weights"
        assert rank["kept"]


def test_roles_of_one_process_share_the_groups(results: Any) -> None:
    for rank in good(results[2, "two roles"]):
        assert "one set per process" in str(rank["odd"])
        if rank["first"]:
            assert torch.equal(rank["first"]["log_probs"], rank["second"]["log_probs"])
            assert not torch.equal(rank["first"]["log_probs"], rank["trained"]["log_probs"])
            assert torch.equal(rank["trained"]["log_probs"], rank["again"]["log_probs"])
