"""The layouts and the cache that `rlsdk plan` is told are those of the engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlsdk.interfaces import ConfigError, RankContext, TrainSpec, Workload
from rlsdk_vllm.config import VllmOptions
from rlsdk_vllm.forecast import CONTEXT_BYTES, GRAPH_BYTES, forecast

GIB = 1 << 30
WORK = Workload(row_tokens=128, update_rows=1, running_rows=16)


def test_the_engine_asks_for_the_weights_that_were_foreseen(in_process: Any) -> None:
    engine = in_process.inner
    found = forecast([engine.ctx], engine.spec, WORK)
    (foreseen,), (real,) = found.layouts[0], engine.layout()
    assert replace(foreseen, process=real.process) == real
    whole = sum(box.numel for _, box in real.boxes)
    assert found.memory[0].weights_bytes == 4 * whole
    assert found.memory[0].cache_bytes == 64 << 20


def test_on_a_gpu_the_cache_is_what_its_share_leaves(in_process: Any) -> None:
    served = in_process.inner.spec
    on_gpu = RankContext(role="rollout", device="cuda:0")
    spec = replace(served, options=VllmOptions(gpu_memory_utilization=0.5), tp_size=2)
    memory = forecast([on_gpu], spec, replace(WORK, device_bytes=10 * GIB)).memory[0]
    assert (memory.weights_bytes or 0) + (memory.cache_bytes or 0) == 5 * GIB
    assert memory.weights_bytes == (forecast([on_gpu], served, WORK).memory[0].weights_bytes or 0) // 2
    assert forecast([on_gpu], spec, WORK).memory[0].cache_bytes is None


def test_on_a_gpu_a_sleeping_engine_keeps_its_context_and_graphs(in_process: Any) -> None:
    engine = in_process.inner
    on_gpu = RankContext(role="rollout", device="cuda:0")

    def asleep(ctx: RankContext, options: VllmOptions, **given: Any) -> int:
        spec = replace(engine.spec, options=options, engine_kwargs=given)
        return forecast([ctx], spec, replace(WORK, device_bytes=10 * GIB)).memory[0].asleep_bytes

    own, inside = VllmOptions(), VllmOptions(asynchronous=False)
    assert asleep(on_gpu, own) == CONTEXT_BYTES + GRAPH_BYTES
    assert asleep(on_gpu, inside) == GRAPH_BYTES
    assert asleep(on_gpu, inside, sleep_mode_offload_cudagraph=True) == 0
    assert asleep(on_gpu, VllmOptions(enforce_eager=True)) == CONTEXT_BYTES
    assert asleep(engine.ctx, own) == 0


def test_a_specification_of_the_other_kind_is_refused(in_process: Any) -> None:
    engine = in_process.inner
    with pytest.raises(ConfigError, match="is a rollout backend"):
        forecast([engine.ctx], TrainSpec(model=engine.spec.model), WORK)
