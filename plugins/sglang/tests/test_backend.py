"""Bad settings are refused before anything starts, good ones reach SGLang."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cases import make_engine

from rlsdk.interfaces import ConfigError, Head, ModelSpec, RankContext, RolloutSpec
from rlsdk_sglang import launch
from rlsdk_sglang.config import SglangOptions
from rlsdk_sglang.engine import SglangRolloutEngine
from rlsdk_sglang.launch import engine_arguments


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"model": ModelSpec(path="x", head=Head.VALUE)}, "head 'lm', not 'value'"),
        ({"max_running": 0}, "max_running 0: expected 1 or more"),
        ({"max_model_tokens": 1}, "max_model_tokens 1: expected 2 or more"),
        ({"options": {"kv_cache_mb": 3}}, "RolloutSpec.options is a dict; expected SglangOptions"),
    ],
)
def test_specs_that_cannot_be_served_are_refused_before_anything_starts(given: dict[str, Any], fault: str) -> None:
    spec = RolloutSpec(**{"model": ModelSpec(path="x"), **given})
    with pytest.raises(ConfigError, match=fault):
        SglangRolloutEngine().initialize(RankContext(role="rollout"), spec)


@pytest.mark.parametrize(
    ("kwargs", "fault"),
    [
        (
            {"max_prefil_tokens": 9},
            "max_prefil_tokens: SGLang's ServerArgs has no such field; did you mean 'max_prefill",
        ),
        ({"load_format": "dummy"}, r"\['load_format'\] belong to the plugin itself"),
    ],
)
def test_arguments_that_sglang_does_not_take_are_refused(qwen2: Path, kwargs: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        make_engine(qwen2, engine_kwargs=kwargs)


def test_raw_arguments_reach_the_engine(qwen2: Path) -> None:
    spec = RolloutSpec(model=ModelSpec(path=str(qwen2)), engine_kwargs={"chunked_prefill_size": 384})
    arguments = engine_arguments(RankContext(role="rollout"), spec, SglangOptions(stream_interval=3))
    assert (arguments["chunked_prefill_size"], arguments["stream_interval"]) == (384, 3)


def on_gpus(*names: str, nodes: tuple[str, ...] = ()) -> RankContext:
    return RankContext(role="rollout", node=nodes[0] if nodes else "localhost", device="cuda:0", accelerators=names,
                       bundles=tuple(range(len(names))), device_nodes=nodes)  # fmt: skip


def spec_of(folder: Path, **fields: Any) -> RolloutSpec:
    return RolloutSpec(model=ModelSpec(path=str(folder), dtype="bfloat16"), **fields)


def test_schedulers_see_the_devices_of_their_replica(qwen2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray shows this process device 2 alone; SGLang gives scheduler N the Nth device that it sees."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    ctx, spec = on_gpus("2", "3"), spec_of(qwen2, tp_size=2)
    assert engine_arguments(ctx, spec, SglangOptions())["base_gpu_id"] == 0
    show = [sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"]
    with launch._undisturbed_process(launch.environment(ctx, spec)):
        assert subprocess.run(show, capture_output=True, text=True, check=True).stdout.strip() == "2,3"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2"


@pytest.mark.parametrize(
    ("sizes", "given"),
    [
        ({"tp_size": 2}, {"tp_size": 2, "attn_dp_size": 1, "pp_size": 1, "ep_size": 1}),
        ({"tp_size": 2, "pp_size": 2}, {"tp_size": 2, "attn_dp_size": 1, "pp_size": 2, "ep_size": 1}),
        ({"tp_size": 2, "dp_size": 2, "ep_size": 4}, {"tp_size": 4, "attn_dp_size": 2, "pp_size": 1, "ep_size": 4}),
    ],
)
def test_axes_of_a_replica_are_sglangs_own(qwen2: Path, sizes: dict[str, int], given: dict[str, int]) -> None:
    """As many schedulers as devices, by SGLang's own arithmetic: dp_size x tp_size x pp_size."""
    from sglang.srt.server_args import ServerArgs, compute_world_size

    spec = spec_of(qwen2, **sizes)
    made = engine_arguments(on_gpus(*map(str, range(spec.num_devices))), spec, SglangOptions())
    assert {name: made[name] for name in given} == given
    assert set(made) <= set(ServerArgs.__struct_fields__)
    world = compute_world_size(dp_size=made.get("dp_size", 1), tp_size=made["tp_size"], pp_size=made["pp_size"])
    assert world == spec.num_devices


def test_devices_that_a_replica_cannot_have_are_refused(qwen2: Path) -> None:
    with pytest.raises(ConfigError, match="takes 4 devices; it was given 2: 0, 1"):
        engine_arguments(on_gpus("0", "1"), spec_of(qwen2, tp_size=4), SglangOptions())
    with pytest.raises(ConfigError, match="spans 2 nodes; a replica of 'sglang' stands on one"):
        engine_arguments(on_gpus("0", "0", nodes=("a", "b")), spec_of(qwen2, tp_size=2), SglangOptions())
