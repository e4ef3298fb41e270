"""Bad settings are refused before anything starts, good ones reach SGLang."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cases import make_engine

from rlsdk.interfaces import ConfigError, Head, ModelSpec, RankContext, RolloutSpec
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
