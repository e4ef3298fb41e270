"""Adapters on several ranks: what parity with one process does not show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import EXACT, by_row, good, reference, whole
from peft import PeftModel
from transformers import AutoModelForCausalLM
from worlds import Case, spec_of

from rlsdk.interfaces import CheckpointError, RankContext, Workload
from rlsdk.testing.process.models import random_batch
from rlsdk.testing.process.reference import plain_outputs
from rlsdk_fsdp.forecast import forecast


def test_the_reference_is_the_base_bit_for_bit_also_before_the_first_pass(results: Any) -> None:
    for rank in good(results[2, "adapter probe"]):
        assert rank["first"], "before any other pass"
        assert rank["off"], "after two steps"
        assert rank["kept"]
        assert all(norm > 0 for norm in rank["norms"]), "a reference that is asked first must not freeze the adapter"
        assert rank["moved"] == good(results[2, "adapter probe"])[0]["moved"] > 0.99


def test_exports_of_two_ranks_open_in_peft_and_transformers(results: Any, models: dict[str, str], folder: Path) -> None:
    ranks = good(results[2, "adapter probe"])
    batch = random_batch(11, seed=3)
    base = AutoModelForCausalLM.from_pretrained(models["plain"], dtype=torch.float32)
    opened = PeftModel.from_pretrained(base, folder / "exported_adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(folder / "exported_merged", dtype=torch.float32).eval()
    for model in (opened, merged):
        expected = plain_outputs(model, batch)["log_probs"] * batch["response_mask"]
        rows = dict(zip(batch["row_id"].tolist(), expected.split(batch.lengths.tolist()), strict=True))
        for rank in ranks:
            for row, values in by_row(rank, "after").items():
                assert (values - rows[row]).abs().max() < EXACT


def test_a_checkpoint_goes_on_with_equal_numbers_and_on_one_rank(results: Any) -> None:
    went_on, resumed = good(results[2, "adapter went on"]), good(results[2, "adapter resumed"])
    alone = good(results[1, "adapter resumed"])
    assert [rank["losses"] for rank in went_on] == [rank["losses"] for rank in resumed]
    parts = [whole(ranks) for ranks in (went_on, resumed, alone)]
    assert all(torch.equal(parts[0][name], parts[1][name]) for name in parts[0])
    assert all((parts[0][name] - parts[2][name]).abs().max() < EXACT for name in parts[0])
    for rank in good(results[2, "adapter probe"]):
        assert rank["resumed"]
        assert rank["equal"]


def test_memory_is_as_foreseen_and_optimizer_state_of_the_adapter_alone(
    results: Any, worlds: dict[int, list[Case]]
) -> None:
    case = next(case for case in worlds[2] if case.name == "adapter probe")
    contexts = [RankContext(role="actor", rank=rank, world_size=2, local_rank=rank) for rank in range(2)]
    found = forecast(contexts, spec_of(case), Workload(row_tokens=16, update_rows=8, running_rows=1))
    for rank, memory in zip(good(results[2, "adapter probe"]), found.memory, strict=True):
        assert memory.weights_bytes == rank["held"]["weights"]
        assert memory.optimizer_bytes == rank["held"]["optimizer"]
        assert (memory.optimizer_bytes or 0) < 0.1 * (memory.weights_bytes or 0)


def test_another_base_is_refused_on_every_rank(results: Any) -> None:
    for rank in good(results[2, "adapter probe"]):
        assert isinstance(rank["refused"], CheckpointError)
        assert "adapter of another model" in str(rank["refused"])


def test_bfloat16_weights_below_a_float32_adapter(results: Any, worlds: dict[int, list[Case]]) -> None:
    case = next(case for case in worlds[2] if case.name == "adapter bfloat16")
    ranks = good(results[2, "adapter bfloat16"])
    expected = reference(case)
    for rank in ranks:
        assert rank["losses"] == pytest.approx(expected["losses"], abs=0.02)
        assert rank["norms"] == pytest.approx(expected["norms"], rel=0.05)
    assert {meta.dtype for rank in ranks for meta in rank["layout"].tensors} == {"bfloat16"}


@pytest.mark.parametrize("name", ["adapter", "adapter resumed"])
def test_shards_of_frozen_weights_are_views(results: Any, name: str) -> None:
    """Weights with an adapter are new memory; the others are sent from where they lie."""
    for rank in good(results[2, name]):
        assert all("_proj" in tensor for tensor in rank["private"])
        assert rank["private"]
