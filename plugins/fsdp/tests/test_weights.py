"""What ranks say they hold, what they hold, and what an export holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import good, whole

from rlsdk.interfaces import Box


@pytest.mark.parametrize(
    ("world", "name", "copies"),
    [(1, "all rows", 1), (2, "odd vocabulary", 1), (2, "value", 1), (4, "all rows", 1), (4, "value", 1),
     (4, "hybrid", 2), (4, "copies only", 4)],
)  # fmt: skip
def test_boxes_tile_every_tensor_exactly_once_in_each_copy(world: int, name: str, copies: int, results: Any) -> None:
    ranks = good(results[world, name])
    for copy in range(copies):
        members = ranks[copy * world // copies : (copy + 1) * world // copies]
        shapes = {meta.name: meta.shape for rank in members for meta in rank["layout"].tensors}
        times = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in shapes.items()}
        for rank in members:
            for key, box in rank["layout"].boxes:
                times[key][box.slices(Box.whole(shapes[key]))] += 1
        assert all(bool((count == 1).all()) for count in times.values())


def test_shards_are_what_the_layout_says_in_its_order(results: Any) -> None:
    for world, name in ((2, "odd vocabulary"), (4, "value"), (4, "hybrid")):
        for rank in good(results[world, name]):
            layout = rank["layout"]
            assert [(key, box) for key, box, _ in rank["shards"]] == list(layout.boxes)
            assert all(tuple(tensor.shape) == box.size for _, box, tensor in rank["shards"])
            assert {meta.name for meta in layout.tensors} == {key for key, _ in layout.boxes}
            dtypes = {meta.name: f"torch.{meta.dtype}" for meta in layout.tensors}
            assert all(str(tensor.dtype) == dtypes[key] for key, _, tensor in rank["shards"])


def test_trained_shards_can_be_read_by_other_processes_where_they_are(results: Any) -> None:
    for world, name in ((1, "all rows"), (2, "odd vocabulary"), (4, "value"), (4, "hybrid")):
        assert [rank["private"] for rank in good(results[world, name])] == [[]] * world


def test_ranks_are_told_apart_and_share_the_work_of_holding(results: Any) -> None:
    layouts = [rank["layout"] for rank in good(results[4, "all rows"])]
    assert [layout.rank for layout in layouts] == [0, 1, 2, 3]
    assert len({layout.process for layout in layouts}) == 4
    sizes = [sum(box.numel for _, box in layout.boxes) for layout in layouts]
    assert max(sizes) < 0.26 * sum(sizes)


def test_a_head_of_one_row_is_held_by_one_rank(results: Any) -> None:
    held = [dict(rank["layout"].boxes).get("score.weight") for rank in good(results[4, "value"])]
    assert held == [Box((0, 0), (1, 128)), None, None, None]


def test_tied_weights_are_held_once(results: Any) -> None:
    for rank in good(results[2, "tied"]):
        assert dict(rank["layout"].tied) == {"lm_head.weight": "model.embed_tokens.weight"}
        assert "lm_head.weight" not in dict(rank["layout"].boxes)


@pytest.mark.parametrize(("case", "export"), [("all rows", "export"), ("tied export", "export_tied")])
def test_an_export_is_read_by_transformers_bit_for_bit(case: str, export: str, results: Any, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    expected = whole(good(results[2, case]))
    model = AutoModelForCausalLM.from_pretrained(folder / export, dtype="auto")
    assert model.dtype is torch.float32
    parameters = dict(model.named_parameters())
    assert parameters.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(parameters[name], tensor), name
    assert AutoTokenizer.from_pretrained(folder / export).eos_token == "<eos>"


@pytest.mark.parametrize(
    ("case", "export", "source"),
    [("export in parts", "parts", "plain"), ("export of copies", "parts_hybrid", "gemma3")],
)
def test_ranks_write_the_files_of_an_export_side_by_side(
    case: str, export: str, source: str, results: Any, folder: Path
) -> None:
    from transformers import AutoModelForCausalLM

    files = sorted((folder / export).glob("model-*.safetensors"))
    assert len(files) >= 4
    whole_bytes = sum(file.stat().st_size for file in files)
    for rank in good(results[4, case]):
        assert 0 < rank["given"] < 0.6 * whole_bytes, "no rank is given the whole model"
        assert rank["largest"] < rank["given"]
    exported = AutoModelForCausalLM.from_pretrained(folder / export, dtype="auto")
    expected = AutoModelForCausalLM.from_pretrained(folder / source).to(exported.dtype).state_dict()
    found = exported.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_offloaded_parts_are_refused_by_name_and_come_back(results: Any) -> None:
    for rank in good(results[2, "offloaded"]):
        assert rank["layout"]
        assert rank["same"]
        assert rank["norm"] > 0
        for key in ("shards", "forward", "step"):
            assert "are offloaded; call onload(['weights'" in str(rank[key])
        assert "did you mean 'weights'" in str(rank["unknown"])
