"""What each worker of a replica would hold; that vLLM's really do is shown by that plugin's tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlsdk.interfaces import Box, ModelSpec, RankContext, RolloutSpec, WeightLayout
from rlsdk.kit.memory.forecast import ModelTensors
from rlsdk.kit.memory.worker_forecast import worker_layouts
from rlsdk.kit.model.hf import load_model_config
from rlsdk.planning.reshard import summarize
from rlsdk.sharding.plan.boxes import covered_elements
from rlsdk.testing.process.models import write_tiny_model
from rlsdk.testing.sharding.tensor_engines import tensor_layout

MIXTURE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
CASES: list[tuple[str, dict[str, Any], dict[str, int]]] = [
    ("qwen2", {}, {"tp_size": 2}),
    ("qwen2", {"tied": True}, {"tp_size": 2, "pp_size": 2}),
    ("qwen2", {"vocab_size": 190}, {"tp_size": 4}),  # 2 heads of keys, and a vocabulary that is padded to 192
    ("llama", {"layers": 5}, {"pp_size": 3}),
    ("qwen3_moe", MIXTURE, {"tp_size": 2}),
    ("qwen3_moe", MIXTURE, {"tp_size": 2, "ep_size": 2}),
    ("qwen3_moe", MIXTURE, {"tp_size": 2, "dp_size": 2, "ep_size": 4}),
]


def foreseen(
    folder: Path, architecture: str, shape: dict[str, Any], split: dict[str, int]
) -> tuple[ModelTensors, tuple[WeightLayout, ...]]:
    model = ModelSpec(path=str(write_tiny_model(folder, architecture=architecture, **shape)), dtype="float32")
    spec = RolloutSpec(model=model, **split)
    tensors = ModelTensors.read(spec)
    found = worker_layouts(tensors, load_model_config(model), RankContext(role="rollout", rank=1), spec)
    assert found is not None
    assert len(found) == len({layout.process for layout in found}) == spec.num_devices
    return tensors, found


@pytest.mark.parametrize(("architecture", "shape", "split"), CASES)
def test_workers_hold_every_tensor_together_and_none_of_them_holds_a_part_twice(
    tmp_path: Path, architecture: str, shape: dict[str, Any], split: dict[str, int]
) -> None:
    tensors, layouts = foreseen(tmp_path, architecture, shape, split)
    for name, size in tensors.shapes.items():
        held = [[box for n, box in layout.boxes if n == name] for layout in layouts]
        assert covered_elements(Box.whole(size), [box for mine in held for box in mine]) == torch.Size(size).numel()
        for mine in held:
            assert sum(box.numel for box in mine) == covered_elements(Box.whole(size), mine)
        # By how many ranks it is held: attention by each copy, experts that are dealt out or cut by one.
        ways = split.get("dp_size", 1) if ".experts." not in name else 1
        total = sum(box.numel for mine in held for box in mine)
        if (
            "proj" in name
            and name.endswith("weight")
            and not (split.get("tp_size") == 4 and ("k_" in name or "v_" in name))
        ):
            assert total == ways * torch.Size(size).numel(), name


def test_heads_of_keys_are_copied_where_there_are_fewer_than_ranks_and_the_vocabulary_is_padded(tmp_path: Path) -> None:
    tensors, layouts = foreseen(tmp_path, *CASES[2])
    keys = "model.layers.0.self_attn.k_proj.weight"
    half = tensors.shapes[keys][0] // 2
    assert [dict(layout.boxes)[keys].offset[0] for layout in layouts] == [0, 0, half, half]
    rows = [dict(layout.boxes)["model.embed_tokens.weight"].size[0] for layout in layouts]
    assert rows == [48, 48, 48, 46]


def test_stages_have_layers_of_their_own(tmp_path: Path) -> None:
    _, layouts = foreseen(tmp_path, *CASES[3])
    found = [sorted({int(name.split(".")[2]) for name, _ in layout.boxes if ".layers." in name}) for layout in layouts]
    assert found == [[0, 1], [2, 3], [4]]
    assert ["model.embed_tokens.weight" in dict(layout.boxes) for layout in layouts] == [True, False, False]
    assert ["lm_head.weight" in dict(layout.boxes) for layout in layouts] == [False, False, True]


def test_a_tensor_of_which_nobody_knows_how_it_is_cut_makes_no_forecast() -> None:
    tensors = ModelTensors({"model.layers.0.mixer.in_proj.weight": (8, 8)}, {})

    class Config:
        num_hidden_layers = 1

        def get_text_config(self) -> Config:
            return self

    spec = RolloutSpec(model=ModelSpec(path="model"), tp_size=2)
    assert worker_layouts(tensors, Config(), RankContext(role="rollout"), spec) is None


def test_the_plan_counts_what_reaches_each_worker(tmp_path: Path) -> None:
    tensors, layouts = foreseen(tmp_path, *CASES[0])
    metas = list({meta.name: meta for layout in layouts for meta in layout.tensors}.values())
    source = tensor_layout(metas, [(m.name, Box.whole(m.shape)) for m in metas], process="train:0", node="elsewhere")
    found = summarize([source], layouts, bucket_bytes=1 << 20)
    held = [4 * sum(box.numel for _, box in layout.boxes) for layout in layouts]
    assert found.workers == found.targets == 2
    assert found.place_bytes == (min(held), max(held))
    assert found.moved_bytes == found.lower_bound_bytes == sum(held) < 1.1 * 4 * tensors.numel
    assert found.predicted_s == pytest.approx(sum(held) / 50e9, rel=1e-6)
