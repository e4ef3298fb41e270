"""The layouts and the cache that `rlsdk plan` is told are those of the engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlsdk.interfaces import AdapterSpec, ConfigError, RankContext, TrainSpec, Workload
from rlsdk.kit.memory.kv_cache import bytes_per_token
from rlsdk.kit.model.hf import load_model_config
from rlsdk_sglang.config import SglangOptions
from rlsdk_sglang.forecast import CONTEXT_BYTES, GRAPH_BYTES, forecast
from rlsdk_sglang.launch import num_cached_tokens

GIB = 1 << 30
WORK = Workload(row_tokens=128, update_rows=1, running_rows=16)


def test_the_engine_asks_for_the_weights_that_were_foreseen(lab: Any) -> None:
    served = lab.inner
    found = forecast([served.ctx], served.spec, WORK)
    (foreseen,), (real,) = found.layouts[0], served.layout()
    assert replace(foreseen, process=real.process, worker=real.worker, host=real.host) == real
    assert found.memory[0].weights_bytes == 4 * sum(box.numel for _, box in real.boxes)
    assert found.memory[0].cache_bytes == 64 << 20


def test_an_adapter_that_is_sent_alone_is_counted_and_so_are_its_versions(lab: Any) -> None:
    served = lab.inner
    adapter = AdapterSpec(rank=8, alpha=8.0, targets=("q_proj", "v_proj"))
    spec = replace(served.spec, model=replace(served.spec.model, adapter=adapter), adapter_versions=2)
    config = load_model_config(spec.model).get_text_config()
    groups = config.hidden_size // config.num_attention_heads * config.num_key_value_heads
    rows_and_columns = 2 * config.hidden_size + config.hidden_size + groups
    assert forecast([served.ctx], spec, WORK).adapter_bytes == 4 * 8 * rows_and_columns * config.num_hidden_layers
    with pytest.raises(ConfigError, match=r"rollout\.sglang\.max_adapters 2: expected 3 or more, as 2 versions"):
        forecast([served.ctx], replace(spec, options=SglangOptions(max_adapters=2)), WORK)


def test_unasked_a_cpu_keeps_room_for_all_running_samples(lab: Any) -> None:
    served = lab.inner
    spec = replace(served.spec, options=SglangOptions())
    one = bytes_per_token(load_model_config(spec.model), spec.model.dtype)
    foreseen = forecast([served.ctx], spec, WORK).memory[0].cache_bytes
    assert foreseen == (num_cached_tokens(served.ctx, spec, SglangOptions()) or 0) * one


def test_on_a_gpu_the_cache_is_what_its_share_leaves_and_a_server_s_is_not_known(lab: Any) -> None:
    served = lab.inner
    on_gpu = RankContext(role="rollout", device="cuda:0")
    spec = replace(served.spec, options=SglangOptions(memory_share=0.5), tp_size=2)
    memory = forecast([on_gpu], spec, replace(WORK, device_bytes=10 * GIB)).memory[0]
    assert (memory.weights_bytes or 0) + (memory.cache_bytes or 0) == 5 * GIB
    assert memory.weights_bytes == (forecast([on_gpu], served.spec, WORK).memory[0].weights_bytes or 0) // 2
    server = replace(spec, options=SglangOptions(url="http://127.0.0.1:30000"))
    of_server = forecast([on_gpu], server, replace(WORK, device_bytes=10 * GIB)).memory[0]
    assert (of_server.cache_bytes, of_server.asleep_bytes) == (None, 0)
    assert memory.asleep_bytes == CONTEXT_BYTES + GRAPH_BYTES
    without = replace(spec, options=SglangOptions(cuda_graphs=False))
    assert forecast([on_gpu], without, WORK).memory[0].asleep_bytes == CONTEXT_BYTES
    with pytest.raises(ConfigError, match="is a rollout backend"):
        forecast([on_gpu], TrainSpec(model=spec.model), WORK)
