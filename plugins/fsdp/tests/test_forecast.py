"""The layouts that `rlsdk plan` is told are those that ranks come to hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from comparing import good
from worlds import spec_of

from rlsdk.interfaces import RankContext, Workload
from rlsdk_fsdp.forecast import forecast

WORK = Workload(row_tokens=16, update_rows=8, running_rows=1)


@pytest.mark.parametrize(
    ("world", "name"),
    [(1, "all rows"), (2, "all rows"), (2, "odd vocabulary"), (2, "tied"), (2, "value"), (2, "gpt2"), (2, "mixture"),
     (2, "adapter"), (2, "adapter bfloat16"),
     (2, "bfloat16"), (2, "bfloat16 weights"), (2, "host"), (4, "all rows"), (4, "value"), (4, "hybrid"),
     (4, "copies only"), (2, "split rows"), (4, "split rows")],
)  # fmt: skip
def test_ranks_hold_the_layouts_that_were_foreseen(world: int, name: str, results: Any, worlds: Any) -> None:
    case = next(case for case in worlds[world] if case.name == name)
    spec = spec_of(case)
    contexts = [RankContext(role="actor", rank=rank, world_size=world, local_rank=rank) for rank in range(world)]
    found = forecast(contexts, spec, WORK)
    for rank, (foreseen,) in zip(good(results[world, name]), found.layouts, strict=True):
        real = rank["layout"]
        assert replace(foreseen, process=real.process) == real
    assert found.dp_size == good(results[world, name])[0]["place"].dp_size
    if spec.model.adapter is not None:
        return  # beside the weights there is the adapter: see test_adapter.py
    whole = sum(box.numel for (layout,) in found.layouts for _, box in layout.boxes)
    held = sum(memory.weights_bytes or 0 for memory in found.memory)
    assert held == whole * (2 if name == "bfloat16 weights" else 4)
