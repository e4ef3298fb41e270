"""The layouts that `rlsdk plan` is told are those that ranks come to hold; memory is what ranks were seen to take."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from comparing import good
from worlds import spec_of

from rlsdk.interfaces import ConfigError, Forecast, ModelSpec, RankContext, RolloutSpec, Workload
from rlsdk_megatron.config import MegatronOptions
from rlsdk_megatron.forecast import forecast

WORK = Workload(row_tokens=16, update_rows=8, running_rows=1)


def contexts(world: int, device: str = "cpu") -> Sequence[RankContext]:
    return [RankContext(role="actor", rank=at, world_size=world, local_rank=at, device=device) for at in range(world)]


@pytest.mark.parametrize(
    ("world", "name"),
    [(1, "all rows"), (1, "mixture"), (2, "tp2"), (2, "tied tp2 sp"), (2, "odd vocabulary tp2"), (2, "value tp2"),
     (2, "mixture tp2"), (2, "mixture dp2"), (2, "mixture ep2"), (2, "bfloat16 tp2"), (2, "pp2"), (2, "tied pp2"),
     (2, "score pp2"), (2, "vpp2"), (2, "dp2")],
)  # fmt: skip
def test_ranks_hold_the_layouts_that_were_foreseen(world: int, name: str, results: Any, worlds: Any) -> None:
    case = next(case for case in worlds[world] if case.name == name)
    found = forecast(contexts(world), spec_of(case, case.options), WORK)
    for rank, (foreseen,) in zip(good(results[world, name]), found.layouts, strict=True):
        real = rank["layout"]
        assert replace(foreseen, process=real.process) == real


def planned(models: Any, *, device: str = "cpu", world: int = 8, **options: Any) -> Forecast:
    from worlds import Case

    case = Case("foreseen", models["plain"], rows=1)
    return forecast(contexts(world, device), spec_of(case, MegatronOptions(**options)), WORK)


def test_ranks_that_share_more_hold_less(models: Any) -> None:
    alone, cut, whole = (
        planned(models, world=1),
        planned(models, tensor_parallel=2, pipeline_parallel=2),
        planned(models, distributed_optimizer=False),
    )
    assert (alone.dp_size, cut.dp_size, whole.dp_size) == (1, 2, 8)
    one = alone.memory[0]
    assert whole.memory[0].optimizer_bytes == one.optimizer_bytes == 2 * (one.weights_bytes or 0)
    assert planned(models).memory[0].optimizer_bytes == (one.optimizer_bytes or 0) // 8
    assert sum(memory.weights_bytes or 0 for memory in cut.memory) < 2.5 * (one.weights_bytes or 0)
    # The first stage waits for the second, so it holds two micro-batches of half of the layers.
    first, last = cut.memory[0], cut.memory[-1]
    assert (first.backward_bytes or 0) > (first.forward_bytes or 0) > 0
    assert (last.backward_bytes or 0) < (one.backward_bytes or 0)


def test_a_split_that_does_not_fit_is_refused_as_the_engine_would(models: Any) -> None:
    with pytest.raises(ConfigError, match=r"train\.megatron\.tensor_parallel: 3"):
        planned(models, tensor_parallel=3)
    with pytest.raises(ConfigError, match="is a train backend"):
        forecast(contexts(1), RolloutSpec(model=ModelSpec(path=models["plain"])), WORK)


def test_nothing_of_megatron_is_imported() -> None:
    program = "import sys, rlsdk_megatron.forecast\nprint([m for m in sys.modules if m.startswith('megatron')])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"
