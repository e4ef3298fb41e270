"""Bad settings are refused before anything starts, good ones reach vLLM."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from cases import make_engine

from rlsdk.interfaces import ConfigError, Head, ModelSpec, RankContext, RolloutSpec
from rlsdk.testing.process.models import ROUTED, write_tiny_model
from rlsdk_vllm import arguments
from rlsdk_vllm.engine import VllmRolloutEngine

PLUGIN = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"model": ModelSpec(path="x", head=Head.VALUE)}, "head 'lm', not 'value'"),
        ({"max_running": 0}, "max_running 0: expected 1 or more"),
        ({"max_model_tokens": 1}, "max_model_tokens 1: expected 2 or more"),
        ({"options": {"kv_cache_mb": 3}}, "RolloutSpec.options is a dict; expected VllmOptions"),
    ],
)
def test_specs_that_cannot_be_served_are_refused_before_anything_starts(given: dict[str, Any], fault: str) -> None:
    spec = RolloutSpec(**{"model": ModelSpec(path="x"), **given})
    with pytest.raises(ConfigError, match=fault):
        VllmRolloutEngine().initialize(RankContext(role="rollout"), spec)


@pytest.mark.parametrize(
    ("kwargs", "fault"),
    [
        ({"enforce_eagr": True}, "enforce_eagr: vLLM's EngineArgs has no such field; did you mean 'enforce_eager'"),
        ({"load_format": "dummy"}, r"only the plugin sets \['load_format'\]"),
    ],
)
def test_arguments_that_vllm_does_not_take_are_refused(qwen2: Path, kwargs: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        make_engine(qwen2, engine_kwargs=kwargs)


def test_raw_arguments_reach_the_engine(qwen2: Path) -> None:
    engine = make_engine(qwen2, engine_kwargs={"max_num_batched_tokens": 384})
    try:
        assert engine.engine.engine._engine.vllm_config.scheduler_config.max_num_batched_tokens == 384
    finally:
        engine.close()


def test_a_model_that_vllm_refuses_is_a_config_error(tmp_path: Path) -> None:
    """Its CPU attention takes no heads of 16."""
    from rlsdk.testing.process.models import write_tiny_model

    folder = write_tiny_model(tmp_path / "small", hidden_size=64, head_dim=16)
    with pytest.raises(ConfigError, match="heads have 16 dimensions; vLLM on a CPU takes"):
        make_engine(folder)


def test_a_model_that_vllm_builds_smaller_is_a_config_error(tmp_path: Path) -> None:
    """Its Qwen2 takes no notice of `head_dim`, and its loaders none of rows for which they have no place."""
    from rlsdk.testing.process.models import write_tiny_model

    folder = write_tiny_model(tmp_path / "wide", hidden_size=128, head_dim=64)
    with pytest.raises(ConfigError, match=r"does not hold all of canonical tensor .*\.self_attn\.[kqv]_proj"):
        make_engine(folder)


def test_an_environment_of_its_own_is_made_of_what_the_tests_run_with() -> None:
    recipe = tomllib.loads((PLUGIN / "src" / "rlsdk_vllm" / "install.toml").read_text())["cpu"]
    lines = [line for line in (PLUGIN / "overrides.txt").read_text().splitlines() if line and line[0] != "#"]
    assert recipe["overrides"] == lines
    assert set(recipe["requires"]) <= set((PLUGIN / "tested.txt").read_text().splitlines())


def test_latent_attention_that_a_cpu_would_rotate_wrongly_is_refused(tmp_path: Path) -> None:
    """As DeepSeek's own files have it (yarn) it is right."""
    yarn = {
        **{"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 2.0, "original_max_position_embeddings": 256},
        **{"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1},
    }
    for name, more in (("default", {}), ("yarn", {"rope_parameters": yarn})):
        folder = write_tiny_model(tmp_path / name, architecture="deepseek_v3", **{**ROUTED, **more})
        spec = RolloutSpec(model=ModelSpec(path=str(folder), dtype="float32"))
        if name == "yarn":
            arguments.check_cpu_attention(spec)
        else:
            with pytest.raises(ConfigError, match="rotates latent attention wrongly where rope_type is 'default'"):
                arguments.check_cpu_attention(spec)
