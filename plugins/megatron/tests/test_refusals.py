"""What is refused before any process starts, in words that name the values that would work."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from comparing import good

from rlsdk.interfaces import BackendKind, BackendSpec, Capability, ChecksPlace, ConfigError
from rlsdk_megatron.config import MegatronOptions, split_problems

MODEL = {
    "model_type": "qwen2",
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
}
EXPERTS = {**MODEL, "model_type": "qwen3_moe", "num_experts": 6}


@pytest.mark.parametrize(
    ("options", "num_ranks", "model", "field", "said"),
    [
        ({"tensor_parallel": 2}, 3, {}, "tensor_parallel", "the 3 ranks; expected tensor_parallel one of [1, 3]"),
        ({"tensor_parallel": 5}, 5, MODEL, "tensor_parallel", "expected one of [1, 2, 4, 12]"),
        ({"tensor_parallel": 3}, 3, MODEL, "tensor_parallel", "12 attention heads, 4 key-value heads"),
        ({"pipeline_parallel": 4}, 4, MODEL, "pipeline_parallel", "the 6 layers; expected one of [1, 2, 3, 6]"),
        ({"pipeline_parallel": 2, "virtual_stages": 2}, 2, MODEL, "virtual_stages", "expected one of [1, 3]"),
        ({"virtual_stages": 2}, 2, MODEL, "virtual_stages", "pipeline_parallel is 1"),
        ({"expert_parallel": 2}, 2, MODEL, "expert_parallel", "'qwen2' has no experts; expected 1"),
        ({"expert_parallel": 4}, 4, EXPERTS, "expert_parallel", "pipeline stage; expected one of [1, 2]"),
        ({"tensor_parallel": 2}, 2, EXPERTS, "sequence_parallel", "expected True"),
        ({"sequence_parallel": True}, 2, {}, "sequence_parallel", "tensor_parallel is 1"),
        ({"transformer_engine": "always"}, 1, {}, "transformer_engine", "CUDA only"),
        ({"overlap_param_gather": True, "distributed_optimizer": False}, 2, {}, "overlap_param_gather", "False"),
        ({"pipeline_parallel": 0}, 1, {}, "pipeline_parallel", "0: expected 1 or more"),
    ],
)  # fmt: skip
def test_wrong_splits_name_field_value_and_what_would_work(
    options: dict[str, Any], num_ranks: int, model: dict[str, Any], field: str, said: str
) -> None:
    found = dict(split_problems(MegatronOptions(**options), num_ranks=num_ranks, device="cpu", model=model))
    assert said in found[field]


@pytest.mark.parametrize(
    ("options", "num_ranks", "device", "model"),
    [
        ({}, 1, "cpu", MODEL),
        ({"tensor_parallel": 12, "sequence_parallel": True}, 24, "cpu", MODEL),
        ({"tensor_parallel": 2, "pipeline_parallel": 3, "virtual_stages": 2}, 12, "cpu", MODEL),
        ({"expert_parallel": 6}, 6, "cpu", EXPERTS),
        ({"context_parallel": 2, "transformer_engine": "always"}, 4, "cuda", MODEL),
        ({"context_parallel": 2}, 4, "cpu", MODEL),
    ],
)
def test_splits_that_fit_pass(options: dict[str, Any], num_ranks: int, device: str, model: dict[str, Any]) -> None:
    assert not list(split_problems(MegatronOptions(**options), num_ranks=num_ranks, device=device, model=model))


def test_rlsdk_train_refuses_a_wrong_split_before_any_process_starts(models: dict[str, str], tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "rlsdk.cli", "train", "--model", models["plain"], "--data", "reasoning_gym:chain_sum",
        "--reward", "exact_match", "--train-backend", "megatron", "--placement.devices_per_node", "8",
        "--train.megatron.tensor_parallel", "8",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode != 0
    assert "train.megatron.tensor_parallel" in said
    assert "8 does not split 4 attention heads, 2 key-value heads" in said
    assert "expected one of [1, 2, 4]" in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model_type": "gpt_neox"}, "'gpt_neox'"),
        ({"mlp_bias": True}, "mlp_bias True"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn'"),
    ],
)
def test_models_with_more_than_is_built_are_refused(changed: dict[str, Any], said: str) -> None:
    from types import SimpleNamespace

    from rlsdk_megatron.modeling import check_model

    plain = {"model_type": "llama", "hidden_act": "silu"}
    check_model(SimpleNamespace(**plain))
    with pytest.raises(ConfigError, match="backend 'megatron' builds") as caught:
        check_model(SimpleNamespace(**{**plain, **changed}))
    assert said in str(caught.value)


def test_a_frozen_model_only_runs_forward(results: Any) -> None:
    for rank in good(results[2, "frozen"]):
        assert "built without an OptimSpec" in str(rank["train"])
        assert "built without an OptimSpec" in str(rank["reset"])
        assert "a model with head 'lm' gives" in str(rank["head"])


def test_engine_kwargs_reach_megatrons_configuration(results: Any) -> None:
    for rank in good(results[2, "kwargs"]):
        assert rank["reached"] == 0.5
        assert "did you mean 'layernorm_epsilon'" in str(rank["odd"]) or "'layer_norm'" in str(rank["odd"])


def test_nothing_of_the_stand_ins_is_left_after_a_call() -> None:
    import torch

    from rlsdk_megatron.cpu_shim import on_cpu

    def seen() -> tuple[object, ...]:
        return torch.cuda.current_device, torch.cuda.Stream, torch.cuda.random.get_rng_state, torch.zeros(1).type()

    before = seen()
    with on_cpu(), on_cpu():
        assert torch.zeros(1, device="cuda").cuda().device.type == "cpu"
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
    assert seen() == before
    with suppress(ZeroDivisionError), on_cpu():
        raise ZeroDivisionError
    assert seen() == before


def test_the_entry_module_and_options_import_neither_torch_nor_ray() -> None:
    code = (
        "import sys, rlsdk_megatron.plugin, rlsdk_megatron.config, rlsdk_megatron.sizes; "
        "sys.exit(bool({'torch', 'ray', 'transformers', 'megatron'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_plugin_registers_one_backend_whose_engine_and_options_exist() -> None:
    import importlib

    from rlsdk_megatron.plugin import rlsdk_register_backends

    found: list[BackendSpec] = []
    rlsdk_register_backends(register=found.append)
    (spec,) = found
    assert (spec.name, spec.kind) == ("megatron", BackendKind.TRAIN)
    for path in (spec.engine, spec.options or ""):
        module, _, name = path.partition(":")
        assert getattr(importlib.import_module(module), name)
    assert Capability.PIPELINE_PARALLEL in spec.capabilities
    assert isinstance(MegatronOptions(), ChecksPlace)
    assert len(fields(MegatronOptions)) == 11
