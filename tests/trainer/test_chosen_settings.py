"""Settings that are `auto` follow from the device and the size of the model, and notices give the reasons."""

from __future__ import annotations

from typing import Any

import pytest

from rlsdk.config import PlacementConfig, load_config
from rlsdk.config.checks.findings import Findings
from rlsdk.config.checks.training import Training
from rlsdk.interfaces import ModelSpec, RolloutSpec
from rlsdk.kit.model.hf import build_model
from rlsdk.kit.model.shapes import count_parameters, shape_fields
from rlsdk.registry import Registry
from rlsdk.trainer.roles import placement
from rlsdk.trainer.roles.placement import processors_of_device
from rlsdk.trainer.runs.prepare import PreparedRun, prepare


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen2.5-7b", "llama-3.1-70b", "mixtral-8x7b", "qwen3-235b-a22b"])
def test_parameters_are_counted_from_the_shape(name: str) -> None:
    model = build_model(ModelSpec(path=f"shape:{name}"), empty=True)
    real = sum(parameter.numel() for parameter in model.parameters())
    assert count_parameters(shape_fields(f"shape:{name}")) == pytest.approx(real, rel=0.02)
    assert count_parameters({"model_type": "gpt2", "n_embd": 64}) is None


def prepared(model: str, *flags: str) -> PreparedRun:
    task = ["--data", "reasoning_gym:spell_backward", "--reward", "reasoning_gym", "--trainer.steps", "2"]
    config = load_config([], ["--model", f"shape:{model}", "--placement.device", "cuda", *task, *flags])
    return prepare(config, Registry.discover(), Training.RL, Findings(), device="cuda", loads_models=False)


@pytest.mark.parametrize(("model", "size", "chosen"), [("qwen2.5-0.5b", "0.5", False), ("qwen2.5-7b", "7.6", True)])
def test_layers_of_large_models_are_recomputed_on_a_gpu(model: str, size: str, chosen: bool) -> None:
    run = prepared(model)
    assert run.config.train.activation_checkpointing is chosen
    spec: Any = run.table[0].spec
    assert spec.activation_checkpointing is chosen
    value = str(chosen).lower()
    said = f"train.activation_checkpointing {value}: auto, for a model of about {size} billion parameters on a GPU"
    assert said in run.notices


def test_what_is_given_is_kept_and_not_explained() -> None:
    run = prepared("qwen2.5-7b", "--train.activation_checkpointing", "false", "--placement.cpus_per_device", "3")
    assert run.config.train.activation_checkpointing is False
    assert run.placement.pools[0].cpus_per_device == 3
    assert not [notice for notice in run.notices if ": auto, " in notice]


@pytest.mark.parametrize(
    ("given", "device", "gpus", "expected"),
    [
        ({}, "cuda", 8, 12),
        ({}, "cuda", 0, 1),
        ({}, "cpu", 0, 1),
        ({"ray_address": "auto"}, "cuda", 8, 1),
        ({"cpus_per_device": 5}, "cuda", 8, 5),
    ],
)
def test_processors_are_shared_by_the_gpus_of_this_machine(
    given: dict[str, Any], device: str, gpus: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "count_gpus", lambda: gpus)
    monkeypatch.setattr(placement, "usable_processors", lambda: 96)
    assert processors_of_device(PlacementConfig(**given), device) == expected


@pytest.mark.parametrize(("preset", "devices", "shares"), [("colocate_all", 1, True), ("disaggregated", 2, False)])
def test_an_engine_with_devices_of_its_own_is_told_that_it_never_sleeps(
    preset: str, devices: int, shares: bool
) -> None:
    run = prepared("qwen2.5-0.5b", "--placement.preset", preset, "--placement.devices_per_node", str(devices))
    assert [role.spec.shares_devices for role in run.table if isinstance(role.spec, RolloutSpec)] == [shares]
