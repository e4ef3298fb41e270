"""Adapters in vLLM against PEFT itself: its own layers, unmerged, in float32."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import make_engine, worker_of
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlsdk.interfaces import (
    AdapterSpec,
    ConfigError,
    GenerationOutput,
    GenerationRequest,
    ModelSpec,
    RankContext,
    RolloutSpec,
    SamplingParams,
    WeightSyncError,
)
from rlsdk.kit.guards.guarded_rollout import GuardedRolloutEngine
from rlsdk.kit.model.adapters import probe_tokens
from rlsdk.testing.process.models import write_tiny_model
from rlsdk.testing.rollout.lab import collect, whole_shards
from rlsdk_vllm import low_rank
from rlsdk_vllm.config import VllmOptions
from rlsdk_vllm.engine import VllmRolloutEngine

SPEC = AdapterSpec(rank=3, alpha=5.0, scaling="rslora", targets=("q_proj", "v_proj", "up_proj", "down_proj"))
PROMPT = tuple(range(9, 40))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("adapters") / "model", seed=1, sharpness=2.0)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[GuardedRolloutEngine]:
    made = make_engine(folder, adapter=SPEC)
    yield made
    made.close()


def peft_of(folder: Path, seed: int) -> tuple[Any, dict[str, Tensor]]:
    """PEFT's model with random A and B, and these by canonical name."""
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = LoraConfig(r=SPEC.rank, lora_alpha=5, use_rslora=True, target_modules=list(SPEC.targets), lora_dropout=0.0)
    model, generator, values = get_peft_model(base, config).eval(), torch.Generator().manual_seed(seed), {}
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
            values[name.removeprefix("base_model.model.").replace(".default.", ".")] = parameter.detach()
    return model, values


def ask(name: str, max_tokens: int = 24, n: int = 2) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=3)
    return GenerationRequest(request_id=name, prompt_ids=PROMPT, n=n, sampling=sampling)


@torch.no_grad()
def effect_of(model: Any) -> float:
    """Difference that the adapter of a model of PEFT makes to the most probable token after the probe."""
    ids = torch.tensor([probe_tokens(model.config.vocab_size)])
    with_it = model(ids).logits[0, -1].log_softmax(-1).max()
    with model.disable_adapter():
        return abs(float(with_it - model(ids).logits[0, -1].log_softmax(-1).max()))


@torch.no_grad()
def worst(model: Any, outputs: list[GenerationOutput]) -> float:
    """Largest difference of log-probs from a model of PEFT."""
    found = 0.0
    for output in outputs:
        tokens = output.token_ids.tolist()
        logits = model(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
        expected = logits[range(len(tokens)), tokens]
        found = max(found, float((expected - torch.from_numpy(output.log_probs)).abs().max()))
    return found


def test_log_probs_are_pefts_and_a_running_sample_keeps_its_version(engine: GuardedRolloutEngine, folder: Path) -> None:
    (first, one), (second, two) = (peft_of(folder, seed) for seed in (1, 2))

    async def run() -> tuple[list[GenerationOutput], list[GenerationOutput]]:
        engine.update_adapter(whole_shards(one), 1)
        running = asyncio.create_task(collect(engine, [ask("running", 80)]))
        while (engine.num_decoded() or 0) < 8:
            await asyncio.sleep(0)
        receipt = engine.update_adapter(whole_shards(two), 2)
        assert receipt.num_tensors == len(two)
        assert receipt.effect == pytest.approx(effect_of(second), abs=1e-5)
        assert not running.done()
        later = asyncio.create_task(collect(engine, [ask("later", 80)]))
        await asyncio.sleep(0)
        with pytest.raises(WeightSyncError, match=r"2 older ones are in use.*max_adapters 2"):
            engine.update_adapter(iter(()), 3)
        return await running, await later

    running, later = asyncio.run(run())
    assert [output.versions[0].version for output in (*running, *later)] == [1, 1, 2, 2]
    assert worst(first, running) < 1e-5 < worst(second, running)
    assert worst(second, later) < 1e-5 < worst(first, later)


def test_an_engine_that_is_full_takes_an_adapter_and_waits_for_nobody(
    engine: GuardedRolloutEngine, folder: Path
) -> None:
    """A probe of the adapter's effect would wait until a sample ends. Samples that wait, too, are of their version."""

    async def run() -> list[GenerationOutput]:
        engine.update_adapter(whole_shards(peft_of(folder, 1)[1]), 1)
        running, before = asyncio.create_task(collect(engine, [ask("full", 80, n=20)])), engine.num_decoded() or 0
        while (engine.num_decoded() or 0) < before + 40:
            await asyncio.sleep(0)
        assert engine.update_adapter(whole_shards(peft_of(folder, 2)[1]), 2).effect is None
        engine.abort()
        return await running

    outputs = asyncio.run(run())
    assert {len(output.token_ids) > 0 for output in outputs} == {True, False}
    assert {run.version for output in outputs for run in output.versions} == {1}


def test_only_what_a_slot_holds_is_proven(engine: GuardedRolloutEngine, folder: Path) -> None:
    values = peft_of(folder, 4)[1]
    engine.update_adapter(whole_shards(values), 4)
    manager = worker_of(engine).model_runner.lora_manager._adapter_manager
    name = "model.layers.1.mlp.down_proj"
    a, b = values[f"{name}.lora_A.weight"], values[f"{name}.lora_B.weight"] * SPEC.scale
    layer, slot = manager.modules[name], manager.lora_index_to_id.index(engine.engine.num_adapters)  # type: ignore[attr-defined]
    assert low_rank._is_in_slot(layer, 0, slot, a, b)
    assert not low_rank._is_in_slot(layer, 0, slot, a, b * SPEC.scale), "the scale twice"
    layer.lora_a_stacked[0][slot, 0, SPEC.rank + 1, 0] = 1.0
    assert not low_rank._is_in_slot(layer, 0, slot, a, b), "a leftover of an adapter of a higher rank"
    assert low_rank.unbound(manager, [name, "lm_head", "model.embed_tokens"]) == ["lm_head", "model.embed_tokens"]


def test_ranks_beyond_vllms_are_refused() -> None:
    assert low_rank.lora_arguments(AdapterSpec(rank=9), 2, on_cpu=True)["max_lora_rank"] == 16
    with pytest.raises(ConfigError, match=r"model\.lora\.rank 513.*model\.lora\.sync merged"):
        low_rank.lora_arguments(AdapterSpec(rank=513), 2, on_cpu=True)


@pytest.mark.parametrize(
    ("versions", "given", "slots"), [(1, None, 2), (1, 1, 1), (3, None, 4), (3, 4, 4), (3, 3, None)]
)
def test_versions_that_have_no_memory_are_refused_before_anything_starts(
    versions: int, given: int | None, slots: int | None
) -> None:
    spec = RolloutSpec(model=ModelSpec(path="x", adapter=SPEC), adapter_versions=versions)
    options = VllmOptions(max_adapters=given)
    if slots is not None:
        assert low_rank.adapter_slots(spec, options) == slots
        return
    with pytest.raises(ConfigError, match=r"rollout\.vllm\.max_adapters 3: expected 4 or more, as 3 versions"):
        VllmRolloutEngine().initialize(RankContext(role="rollout"), replace(spec, options=VllmOptions(max_adapters=3)))
