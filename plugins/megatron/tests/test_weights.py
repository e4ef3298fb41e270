"""What ranks say they hold, what they hold, and where it goes: boxes, planned moves, exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import good, whole

from rlsdk.interfaces import Box

SPLITS = [
    (2, "tp2"), (2, "tp2 sp"), (2, "pp2"), (2, "vpp2"), (2, "dp2"), (2, "value tp2"), (2, "score pp2"), (2, "tied pp2"),
    (2, "odd vocabulary tp2"), (2, "mixture ep2"), (2, "mixture tp2"), (4, "tp2 pp2"), (4, "tp2 dp2"), (4, "tp4"),
    (4, "mixture dp4 ep2"),
]  # fmt: skip


@pytest.mark.parametrize(("world", "name"), SPLITS)
def test_shards_are_what_the_layout_says_and_cover_every_tensor(world: int, name: str, results: Any) -> None:
    ranks = good(results[world, name])
    for rank in ranks:
        layout = rank["layout"]
        assert [(key, box) for key, box, _ in rank["shards"]] == list(layout.boxes)
        assert all(tuple(tensor.shape) == box.size for _, box, tensor in rank["shards"])
        assert {meta.name for meta in layout.tensors} == {key for key, _ in layout.boxes}
        boxes: dict[str, list[Box]] = {}
        for key, box in layout.boxes:
            assert all(box.intersect(other) is None for other in boxes.setdefault(key, []))
            boxes[key].append(box)
    whole(ranks)
    assert [rank["layout"].rank for rank in ranks] == list(range(world))
    assert len({rank["layout"].process for rank in ranks}) == world


@pytest.mark.parametrize("name", ["tp2", "dp2", "dp2 whole optimizer", "vpp2", "tied pp2", "mixture ep2"])
def test_weights_lie_where_other_processes_can_read_them(name: str, results: Any) -> None:
    for rank in good(results[2, name]):
        assert rank["lent"]


def test_tied_weights_are_named_once_and_held_by_both_ends_of_the_pipeline(results: Any) -> None:
    for rank in good(results[2, "tied pp2"]):
        assert dict(rank["layout"].tied) == {"lm_head.weight": "model.embed_tokens.weight"}
        names = [name for name, _ in rank["layout"].boxes]
        assert "lm_head.weight" not in names
        assert names.count("model.embed_tokens.weight") == 1


@pytest.mark.parametrize(
    ("case", "export"), [("tp2", "export"), ("tied pp2", "export_tied"), ("mixture ep2", "export_mixture")]
)
def test_an_export_is_read_by_transformers_bit_for_bit(case: str, export: str, results: Any, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    expected = whole(good(results[2, case]))
    model = AutoModelForCausalLM.from_pretrained(folder / export, dtype="auto")
    assert model.dtype is torch.float32
    parameters = dict(model.named_parameters())
    assert parameters.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(parameters[name], tensor), name
    if case != "mixture ep2":
        assert AutoTokenizer.from_pretrained(folder / export).eos_token == "<eos>"


@pytest.mark.parametrize(
    ("case", "export", "source"),
    [("export in parts", "parts", "tied"), ("export of experts", "parts_mixture", "mixture")],
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
    exported = AutoModelForCausalLM.from_pretrained(folder / export, dtype="auto").state_dict()
    expected = AutoModelForCausalLM.from_pretrained(folder / source, dtype="auto").state_dict()
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in expected.items())


def test_offloaded_parts_are_refused_by_name_and_come_back(results: Any) -> None:
    for rank in good(results[2, "offloaded"]):
        assert rank["layout"]
        assert rank["same"]
        assert rank["norm"] > 0
        assert all("are offloaded; call onload(['weights'" in str(error) for error in rank["refused"])
        assert "did you mean 'weights'" in str(rank["unknown"])


@pytest.mark.parametrize("name", ["dp2 offloaded", "tp2 offloaded"])
def test_memory_lent_to_the_host_is_gone_from_the_device_until_it_is_back(name: str, results: Any) -> None:
    for rank in good(results[2, name]):
        before, meanwhile = rank["offload_bytes"]
        assert before > 0
        assert meanwhile == 0
