"""A run that stops and goes on, under another split, ends in the numbers of one that never stopped.

Cases named "resumed ..." are compared with one process in `test_parity`: their first step was taken by the run that
saved, so moments and the step count of Adam must have come along.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from comparing import good, whole

from rlsdk.interfaces import CheckpointError


def test_resuming_under_the_same_split_is_exact(results: Any) -> None:
    went_on, resumed = whole(good(results[2, "dp2 micro 3"])), whole(good(results[2, "resumed"]))
    for name, tensor in went_on.items():
        assert torch.equal(resumed[name], tensor), name
    assert good(results[2, "resumed"])[0]["norms"] == good(results[2, "dp2 micro 3"])[0]["norms"]


def test_a_checkpoint_holds_no_pickle_and_each_box_once(results: Any, folder: Path) -> None:
    from safetensors import safe_open

    good(results[2, "dp2 micro 3"])
    files = sorted(path.name for path in (folder / "saved_dp2").iterdir())
    assert files == ["engine.json", "index.json", "rank-00000.safetensors", "rank-00001.safetensors"]
    keys: list[str] = []
    for name in files[2:]:
        with safe_open(folder / "saved_dp2" / name, framework="pt") as file:
            keys += file.keys()
    assert len(keys) == len(set(keys))
    assert {key.partition("/")[0].partition("@")[0] for key in keys} == {"weight", "exp_avg", "exp_avg_sq", "random"}


def test_a_rank_opens_the_files_that_hold_its_own_boxes(results: Any) -> None:
    """Two stages, a file each, read by two ranks a stage; and the ranks that have one read their random state."""
    files = [sorted(set(names)) for names in good(results[4, "opened"])]
    first, second = "rank-00000.safetensors", "rank-00001.safetensors"
    assert files == [[first], [first, second], [second], [second]]


def test_damaged_checkpoints_are_refused_on_every_rank_and_change_nothing(results: Any) -> None:
    for rank in good(results[4, "damaged"]):
        assert rank["unchanged"]
        for name, error in rank["errors"].items():
            assert isinstance(error, CheckpointError), name
        assert "engine.json" in str(rank["errors"]["no state"])
        assert "index.json" in str(rank["errors"]["no index"])
        assert "a file was replaced" in str(rank["errors"]["other file"])
        assert "rank-00001" in str(rank["errors"]["half"])
        assert "saved from another model" in str(rank["errors"]["other model"])
