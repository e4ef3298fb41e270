"""Checkpoints go on where they stopped, at any number of ranks; what is not whole is refused on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import EXACT, compare, good, reference
from worlds import Case

from rlsdk.interfaces import CheckpointError


@pytest.mark.parametrize(
    ("world", "name"),
    [
        (2, "went on"),
        (2, "resumed"),
        (1, "resumed"),
        (4, "resumed"),
        (4, "hybrid resumed"),
        (1, "resumed from hybrid"),
        (2, "split rows went on"),
        (2, "split rows resumed"),
        (1, "resumed from split rows"),
    ],
)
def test_a_checkpoint_goes_on_as_one_process_that_never_stopped(
    world: int, name: str, worlds: Mapping[int, list[Case]], results: Any
) -> None:
    case = next(case for case in worlds[world] if case.name == name)
    difference = compare(results[world, name], reference(replace(case, load=None, first=True)))
    assert max(difference.loss, difference.norm, difference.parameter, difference.output) <= EXACT


def test_at_the_same_number_of_ranks_it_goes_on_to_the_bit(results: Any) -> None:
    for went_on, resumed in zip(good(results[2, "went on"]), good(results[2, "resumed"]), strict=True):
        for key in ("losses", "norms", "lrs", "sums"):
            assert went_on[key] == resumed[key]
        for mine, theirs in zip(went_on["shards"], resumed["shards"], strict=True):
            assert torch.equal(mine[2], theirs[2]), mine[0]
        assert torch.equal(went_on["random"], resumed["random"])


def test_nothing_on_disk_is_a_pickle(results: Any, folder: Path) -> None:
    good(results[2, "went on"])
    for name, ranks in (("saved", 2), ("saved_hybrid", 4)):
        files = sorted(path.name for path in (folder / name).iterdir())
        assert files[0] == "engine.json"
        assert 1 <= len(files) - 1 <= ranks
        assert all(file.endswith(".safetensors") for file in files[1:])


def test_a_rank_opens_the_files_that_hold_its_own_rows(results: Any) -> None:
    """Two files, read by four ranks: the first opens both for what is in them, and tells the others."""
    first, *others = good(results[4, "opened"])
    assert len(first) <= 2 + 2
    assert all(len(names) <= 2 for names in others)
    assert len(others[-1]) == 1, "half a file's rows, and no random state"


def test_copies_of_a_hybrid_are_saved_once(results: Any, folder: Path) -> None:
    good(results[4, "hybrid went on"])
    sizes = [sum(file.stat().st_size for file in (folder / name).iterdir()) for name in ("saved", "saved_hybrid")]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.05)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("no state", "not a complete checkpoint of backend 'fsdp'"),
        ("empty", "not a complete checkpoint of backend 'fsdp'"),
        ("half", "is incomplete"),
        ("cut", "cannot be loaded"),
        ("other model", "was saved from another model"),
        ("name of a moment", "cannot be loaded"),
        ("name of a count", "is damaged"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_refused_on_every_rank(fault: str, told: str, results: Any) -> None:
    for rank in good(results[4, "damaged"]):
        assert isinstance(rank[fault], CheckpointError)
        assert told in str(rank[fault])
        assert len(str(rank[fault])) < 600
        assert rank["weights changed"] is None


def test_a_disk_that_refuses_is_an_error_on_every_rank_and_the_engine_lives(results: Any) -> None:
    for rank in good(results[2, "no disk"]):
        for error in (rank["export"], rank["save"]):
            assert isinstance(error, CheckpointError)
            assert "cannot be written" in str(error)
        assert rank["alive"] is None
