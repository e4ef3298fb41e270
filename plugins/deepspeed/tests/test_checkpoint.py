"""Checkpoints go on where they stopped, at any number of ranks and any stage; what is not whole is refused."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import difference, whole
from jobs import Case, load_damaged, plain, train

from rlsdk.interfaces import CheckpointError
from rlsdk_deepspeed.config import DeepSpeedOptions

SAVED = [(2, 2), (1, 1), (3, 2)]
"""Stage and ranks of runs that save."""
Save = Callable[[tuple[int, int]], tuple[Path, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def saved(models: Any, world: Any, tmp_path_factory: pytest.TempPathFactory) -> Save:
    """Stage and ranks -> folder, and what the run that saved did after it; each runs once, when it is needed."""

    @functools.cache
    def save(source: tuple[int, int]) -> tuple[Path, list[dict[str, Any]]]:
        stage, size = source
        folder = tmp_path_factory.mktemp(f"zero{stage}-{size}")
        return folder, world(size).run(train, Case(models["odd"], DeepSpeedOptions(zero_stage=stage), save=str(folder)))

    return save


@pytest.fixture(scope="module")
def expected(models: Any) -> dict[str, Any]:
    """The same by one process that never stops."""
    return plain(Case(models["odd"]))


@pytest.mark.parametrize("size", [2, 1, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("source", SAVED)
def test_a_run_goes_on_at_another_size_and_stage(
    source: tuple[int, int], stage: int, size: int, models: Any, world: Any, saved: Save, expected: Any
) -> None:
    folder, went_on = saved(source)
    ranks = world(size).run(train, Case(models["odd"], DeepSpeedOptions(zero_stage=stage), load=str(folder)))
    assert max(difference(ranks, expected).values()) <= 1e-5
    if source == (stage, size):
        assert ranks[0]["norms"] == went_on[0]["norms"][2:]
        mine, theirs = whole(ranks), whole(went_on)
        assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())
        assert all(torch.equal(a["random"], b["random"]) for a, b in zip(ranks, went_on, strict=True))


@pytest.mark.parametrize("source", SAVED)
def test_nothing_on_disk_is_a_pickle_and_each_rank_writes_its_part(source: tuple[int, int], saved: Save) -> None:
    files = sorted(saved(source)[0].iterdir())
    assert [file.suffix for file in files] == [".json", *[".safetensors"] * source[1]]
    sizes = [file.stat().st_size for file in files[1:]]
    assert max(sizes) < 1.1 * min(sizes)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("no state", "not a complete checkpoint of backend 'deepspeed'"),
        ("half", "is incomplete"),
        ("cut", "is incomplete"),
        ("other model", "was saved from another model"),
        ("other range", "is damaged"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_refused_on_every_rank(
    fault: str, told: str, models: Any, world: Any, saved: Save, tmp_path: Path
) -> None:
    folder, _ = saved((2, 2))
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    second = copy / "rank-00001-of-00002.safetensors"
    if fault == "no state":
        (copy / "engine.json").unlink()
    if fault == "half":
        second.unlink()
    if fault == "cut":
        second.write_bytes(second.read_bytes()[:-1000])
    if fault == "other range":
        second.write_bytes(second.read_bytes().replace(rb"lm_head.weight\": [", rb"lm_head.weighT\": ["))
    case = Case(models["plain" if fault == "other model" else "odd"])
    for rank in world(2).run(load_damaged, case, [str(copy)]):
        assert isinstance(rank[str(copy)], CheckpointError)
        assert told in str(rank[str(copy)])
        assert rank["kept"]
