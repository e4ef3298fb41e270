"""Adapters of every split: what parity of losses, norms and served weights does not show. Their reference is PEFT, in
one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import EXACT, by_row, good, reference, whole
from peft import PeftModel
from transformers import AutoModelForCausalLM
from worlds import Case, spec_of

from rlsdk.interfaces import AdapterSpec, CheckpointError, ConfigError, RankContext, Workload
from rlsdk.testing.process.models import random_batch
from rlsdk.testing.process.reference import plain_outputs
from rlsdk_megatron.config import MegatronOptions
from rlsdk_megatron.forecast import forecast

WORK = Workload(row_tokens=16, update_rows=8, running_rows=1)
PAIRS = (
    "tp2", "sp", "tied sp", "offloaded", "tied pp2", "of one stage", "vpp2", "dp2", "overlapped", "from tp2", "cp2",
    "ep2",
)  # fmt: skip
OTHERS = (
    *((1, f"adapter{name}") for name in ("", " from tp2")),
    *((4, f"adapter {name}") for name in ("tp2 pp2 sp", "tp2 dp2", "tp4", "tp2 ep2", "from tp2")),
)


def contexts(world: int, device: str = "cpu") -> list[RankContext]:
    return [RankContext(role="actor", rank=at, world_size=world, local_rank=at, device=device) for at in range(world)]


@pytest.mark.parametrize("name", PAIRS)
def test_a_and_b_of_two_ranks_equal_those_of_peft(name: str, worlds: Mapping[int, list[Case]], results: Any) -> None:
    check_low(2, f"adapter {name}", worlds, results)


def check_low(world: int, name: str, worlds: Mapping[int, list[Case]], results: Any) -> None:
    """A and B against one process; losses, norms, outputs and weights of the same cases are compared in
    `test_parity`."""
    case = next(case for case in worlds[world] if case.name == name)
    ranks, expected = good(results[world, name]), reference(case)
    low = whole([rank["low"] for rank in ranks])
    told = {name: tensor for name, _, tensor in expected["low"]["shards"]}
    assert low.keys() == told.keys()
    assert max(float((low[name] - tensor).abs().max()) for name, tensor in told.items()) <= EXACT
    assert {meta.dtype for rank in ranks for meta in rank["low"]["layout"].tensors} == {"float32"}
    if not case.offloaded:
        assert all(rank["lent low"] for rank in ranks), "others of the node read A and B in place"


def test_norms_are_of_adapters_alone_and_clipped(worlds: Mapping[int, list[Case]], results: Any) -> None:
    full, low = good(results[2, "tp2 micro 3"])[0]["norms"], good(results[2, "adapter tp2"])[0]["norms"]
    assert max(low) > 1.0, "the limit clips"
    assert low != pytest.approx(full, rel=0.1)


@pytest.mark.parametrize(("world", "name"), OTHERS)
def test_a_and_b_of_one_and_four_ranks_equal_those_of_peft(
    world: int, name: str, worlds: Mapping[int, list[Case]], results: Any
) -> None:
    check_low(world, name, worlds, results)


def test_a_rank_without_rows_of_a_layer_holds_its_a(results: Any) -> None:
    ranks = good(results[4, "adapter tp4"])
    names = [{name for name, _, _ in rank["low"]["shards"]} for rank in ranks]
    key = "model.layers.0.self_attn.k_proj.lora_{}.weight"
    assert all(key.format("A") in held for held in names)
    assert 0 < sum(key.format("B") in held for held in names) < 4


def test_the_reference_is_the_base_bit_for_bit_also_before_the_first_pass(results: Any) -> None:
    for rank in good(results[2, "adapter probe"]):
        assert rank["first"], "before any other pass"
        assert rank["off"], "after two steps"
        assert rank["kept"]
        assert all(norm > 0 for norm in rank["norms"])
        assert rank["moved"] == good(results[2, "adapter probe"])[0]["moved"] > 0.99
        assert rank["base with gradients"] == []


def test_exports_open_in_peft_and_transformers(results: Any, models: dict[str, str], folder: Path) -> None:
    ranks = good(results[2, "adapter probe"])
    batch = random_batch(11, seed=3)
    base = AutoModelForCausalLM.from_pretrained(models["plain"], dtype=torch.float32)
    opened = PeftModel.from_pretrained(base, folder / "exported_adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(folder / "exported_merged", dtype=torch.float32).eval()
    for model in (opened, merged):
        expected = plain_outputs(model, batch)["log_probs"] * batch["response_mask"]
        rows = dict(zip(batch["row_id"].tolist(), expected.split(batch.lengths.tolist()), strict=True))
        found = {**ranks[0], "after": {"log_probs": ranks[0]["after"]}}
        for row, values in by_row(found, "after", "log_probs").items():
            assert (values - rows[row]).abs().max() < EXACT


def test_a_checkpoint_keeps_the_reference_and_refuses_another_base(results: Any) -> None:
    for rank in good(results[2, "adapter probe"]):
        assert rank["resumed"]
        assert rank["equal"]
        assert isinstance(rank["refused"], CheckpointError)
        assert "adapter of another model" in str(rank["refused"])


def test_memory_is_as_foreseen_and_optimizer_state_of_the_adapter_alone(
    results: Any, worlds: Mapping[int, list[Case]]
) -> None:
    case = next(case for case in worlds[2] if case.name == "adapter probe")
    found = forecast(contexts(2), spec_of(case, case.options), WORK)
    for rank, memory in zip(good(results[2, "adapter probe"]), found.memory, strict=True):
        assert memory.weights_bytes == rank["held"]["weights"]
        assert memory.optimizer_bytes == rank["held"]["optimizer"]
        # Buffers are padded.
        assert (memory.gradients_bytes or 0) <= rank["held"]["gradients"] <= (memory.gradients_bytes or 0) + 2048
        assert (memory.optimizer_bytes or 0) < 0.12 * (memory.weights_bytes or 0)


@pytest.mark.parametrize("name", ["adapter tp4", "adapter tp2 pp2 sp", "adapter tp2 ep2"])
def test_ranks_hold_as_much_as_was_foreseen(name: str, results: Any, worlds: Mapping[int, list[Case]]) -> None:
    case = next(case for case in worlds[4] if case.name == name)
    foreseen = forecast(contexts(4), replace(spec_of(case, case.options), optim=None), WORK)
    alone = replace(case, adapter=None)
    without = forecast(contexts(4), replace(spec_of(alone, case.options), optim=None), WORK)
    for rank, memory, base in zip(good(results[4, name]), foreseen.memory, without.memory, strict=True):
        low = sum(tensor.nbytes for _, _, tensor in rank["low"]["shards"])
        assert (memory.weights_bytes or 0) - (base.weights_bytes or 0) == low > 0


def test_bfloat16_weights_below_a_float32_adapter(results: Any, worlds: Mapping[int, list[Case]]) -> None:
    case = next(case for case in worlds[2] if case.name == "adapter bfloat16")
    ranks, expected = good(results[2, "adapter bfloat16"]), reference(case)
    for rank in ranks:
        assert rank["losses"] == pytest.approx(expected["losses"], abs=0.02)
        assert rank["norms"] == pytest.approx(expected["norms"], rel=0.05)
        assert {meta.dtype for meta in rank["layout"].tensors} == {"bfloat16"}
        assert {meta.dtype for meta in rank["low"]["layout"].tensors} == {"float32"}


def test_shards_of_frozen_weights_lie_where_they_are_read(results: Any) -> None:
    """With an adapter beside one layer alone, all other ranks' weights are sent from where they lie."""
    first, second = good(results[2, "adapter of one stage"])
    assert first["lent"]
    assert not first["low"]["shards"]
    assert not second["lent"]


@pytest.mark.parametrize(
    ("model", "targets", "device", "said"),
    [
        ("plain", ("lm_head",), "cpu", "targets 'lm_head': backend 'megatron' has adapters beside"),
        ("tied", ("lm_head",), "cpu", "is tied to that of another layer"),
        ("plain", ("embed_tokens",), "cpu", "is a Embedding, and no linear layer"),
        ("mixture", ("gate_up_proj",), "cpu", "holds the stacked experts"),
        ("plain", ("q_proj",), "cuda", "--train.megatron.transformer_engine never"),
    ],
)
def test_what_has_no_adapter_is_refused_before_a_run(
    model: str, targets: tuple[str, ...], device: str, said: str, models: dict[str, str]
) -> None:
    case = Case("refused", models[model], rows=1, adapter=AdapterSpec(rank=2, targets=targets))
    with pytest.raises(ConfigError) as caught:
        forecast(contexts(1, device), spec_of(case, MegatronOptions()), WORK)
    assert said in str(caught.value)
