"""Bad settings are refused before anything starts, good ones reach SGLang."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cases import make_engine, on_gpus

from rlsdk.interfaces import (
    ConfigError,
    GenerationRequest,
    Head,
    ModelSpec,
    RankContext,
    RolloutSpec,
    SamplingParams,
)
from rlsdk_sglang import adapter, launch
from rlsdk_sglang.config import SglangOptions
from rlsdk_sglang.engine import SglangRolloutEngine
from rlsdk_sglang.launch import engine_arguments
from rlsdk_sglang.reports import progress_of


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
        ({"load_format": "dummy"}, r"only the plugin sets \['load_format'\]"),
    ],
)
def test_arguments_that_sglang_does_not_take_are_refused(qwen2: Path, kwargs: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        make_engine(qwen2, engine_kwargs=kwargs)


def test_raw_arguments_reach_the_engine(qwen2: Path) -> None:
    spec = RolloutSpec(model=ModelSpec(path=str(qwen2)), engine_kwargs={"chunked_prefill_size": 384})
    arguments = engine_arguments(RankContext(role="rollout"), spec, SglangOptions(stream_interval=3))
    assert (arguments["chunked_prefill_size"], arguments["stream_interval"]) == (384, 3)


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


def report(tokens: list[int], total: int, ended: dict[str, Any] | None = None) -> dict[str, Any]:
    log_probs = [(-float(token), token, None) for token in tokens]
    about = {"finish_reason": ended, "completion_tokens": total, "output_token_logprobs": log_probs}
    return {"output_ids": tokens, "meta_info": about}


@pytest.mark.parametrize(
    "reports",
    [
        [report([1, 2], 2), report([3], 3), report([4], 4, {"type": "length"})],
        # A server that was started otherwise.
        [report([1, 2], 2), report([1, 2, 3], 3), report([1, 2, 3, 4], 4, {"type": "length"})],
        # The report of an abort repeats the last token.
        [report([1, 2], 2), report([3, 4], 4), report([4], 4, {"type": "abort"})],
    ],
)
def test_reports_of_what_is_new_and_of_everything_add_up_alike(reports: list[dict[str, Any]]) -> None:
    tokens: list[int] = []
    log_probs: list[float] = []
    for one in reports:
        progress = progress_of(one, len(tokens))
        tokens += progress.token_ids
        log_probs += progress.log_probs
    assert tokens == [1, 2, 3, 4]
    assert log_probs == [-1.0, -2.0, -3.0, -4.0]
    assert progress.finished is not None


def test_a_sample_is_reported_once_and_not_again_with_every_token(qwen2: Path) -> None:
    """What crosses grows with the length of a response and not with its square."""
    engine = make_engine(qwen2)
    seen: list[int] = []
    take = adapter.progress_of

    def counted(report: Any, known: int, prompt: int | None = None) -> Any:
        seen.append(len(report["output_ids"]))
        return take(report, known, prompt)

    async def sample() -> Any:
        request = GenerationRequest(request_id="r", prompt_ids=(5, 6), sampling=SamplingParams(max_tokens=64))
        return [output async for output in engine.generate([request])]

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(adapter, "progress_of", counted)
            (output,) = asyncio.run(sample())
    finally:
        engine.close()
    assert sum(seen) <= len(output.token_ids) + 1


@pytest.mark.parametrize("own_weights", [True, False])
def test_no_copy_is_kept_of_weights_that_an_update_overwrites(qwen2: Path, own_weights: bool) -> None:
    """And `sleep(1)`, which promises to keep weights, then leaves them where they are."""
    spec = spec_of(qwen2, load_weights=own_weights)
    assert engine_arguments(on_gpus("0"), spec, SglangOptions())["enable_weights_cpu_backup"] is own_weights
    released: list[list[str]] = []
    engine = SglangRolloutEngine()
    engine.ctx, engine.spec, engine.released, engine.lock = on_gpus("0"), spec, set(), threading.RLock()
    engine.engine = SimpleNamespace(sleep=lambda parts: released.append(list(parts)) or 0)  # type: ignore[assignment]
    engine.sleep(1)
    assert released == [["weights", "kv_cache"] if own_weights else ["kv_cache"]]
