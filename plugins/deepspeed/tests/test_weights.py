"""What ranks say they hold, what they hold, what an export holds, and what a plan foresees."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import whole
from jobs import Case, train

from rlsdk.interfaces import RankContext, Workload
from rlsdk_deepspeed.config import DeepSpeedOptions
from rlsdk_deepspeed.forecast import forecast

WORK = Workload(row_tokens=16, update_rows=8, running_rows=1)


@pytest.mark.parametrize("size", [2, 1, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("model", ["odd", "tied", "mixture"])
def test_shards_tile_every_tensor_as_foreseen_and_an_export_holds_them(
    model: str, stage: int, size: int, models: Any, world: Any, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    case = Case(models[model], DeepSpeedOptions(zero_stage=stage), export=str(tmp_path))
    ranks = world(size).run(train, case)
    contexts = [RankContext(role="actor", rank=rank, world_size=size, local_rank=rank) for rank in range(size)]
    found = forecast(contexts, case.spec, WORK)
    for rank, (foreseen,) in zip(ranks, found.layouts, strict=True):
        layout = rank["layout"]
        assert replace(foreseen, process=layout.process) == layout
        assert [(name, box) for name, box, _ in rank["shards"]] == list(layout.boxes)
        assert all(tuple(tensor.shape) == box.size for _, box, tensor in rank["shards"])
        assert rank["private"] == []
    parameters = whole(ranks)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").state_dict()
    assert all(torch.equal(exported[name], tensor) for name, tensor in parameters.items())
    sizes = [sum(box.numel for _, box in rank["layout"].boxes) for rank in ranks]
    assert max(sizes) <= sum(sizes) / size * 1.01 + 200
