"""The same numbers as one process of plain torch, for every stage and split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparing import difference, whole
from jobs import Case, gradient, lent_to_the_host, outputs_of_a_frozen_model, plain, plain_gradient, train

from rlsdk_deepspeed.config import DeepSpeedOptions

EXACT = 1e-5
"""float32."""
STAGES = (1, 2, 3)


def show(name: str, found: dict[str, float]) -> float:
    print(name, {key: f"{value:.1e}" for key, value in found.items()})
    return max(found.values())


@pytest.mark.parametrize("size", [2, 1, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_losses_norms_weights_and_outputs_equal_one_process(stage: int, size: int, models: Any, world: Any) -> None:
    case = Case(models["plain"], DeepSpeedOptions(zero_stage=stage))
    found = difference(world(size).run(train, case), plain(case))
    assert show(f"ZeRO-{stage} x {size}", found) <= EXACT


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("what", ["calls", "lonely", "recomputed", "tied", "odd", "mixture", "offload", "watched"])
def test_other_models_and_calls_equal_one_process_on_two_ranks(what: str, stage: int, models: Any, world: Any) -> None:
    offload = DeepSpeedOptions(zero_stage=stage, offload_optimizer=True, offload_param=stage == 3)
    case = Case(
        models.get(what, models["plain"]),
        offload if what == "offload" else DeepSpeedOptions(zero_stage=stage),
        calls=2 if what == "calls" else 1,
        lonely=what in ("lonely", "watched"),
        checkpointing=what == "recomputed",
        watched=what == "watched",
    )
    found = difference(world(2).run(train, case), plain(case))
    assert show(f"ZeRO-{stage} x 2, {what}", found) <= EXACT


@pytest.mark.parametrize("size", [2, 1, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_heads_run_in_different_numbers_of_chunks(stage: int, size: int, models: Any, world: Any) -> None:
    """Chunks of four tokens; where there are three ranks, the head is the embedding, too."""
    model = models["tied" if size == 3 else "plain"]
    case = Case(model, DeepSpeedOptions(zero_stage=stage), logits=4 * 128, split=True)
    ranks = world(size).run(train, case)
    found = show(f"ZeRO-{stage} x {size}, {[rank['chunks'] for rank in ranks]} chunks", difference(ranks, plain(case)))
    assert found <= EXACT
    assert len({rank["chunks"] for rank in ranks}) == size
    mine, expected = (whole(found) for found in (world(size).run(gradient, case), [plain_gradient(case)]))
    largest = max(float(values.abs().max()) for values in expected.values())
    print("gradient up to", largest)
    off = {name: float((mine[name] - values).abs().max()) / largest for name, values in expected.items()}
    assert show("gradient", off) <= EXACT


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_without_rows_runs_no_chunks(stage: int, models: Any, world: Any) -> None:
    case = Case(models["plain"], DeepSpeedOptions(zero_stage=stage), logits=4 * 128, lonely=True, split=True)
    expected = plain(case)
    found = difference(world(2).run(train, case), expected)
    assert show(f"ZeRO-{stage} x 2, chunks on one rank", found) <= EXACT
    every, none = world(2).run(outputs_of_a_frozen_model, case)
    assert all(torch.equal(values, every[0]) for values in every)
    assert [values.numel() for values in none] == [0, 0, 0]


@pytest.mark.parametrize("stage", STAGES)
def test_bfloat16_passes_stay_near_float32_on_weights_of_float32(stage: int, models: Any, world: Any) -> None:
    case = Case(models["plain"], DeepSpeedOptions(zero_stage=stage), dtype="bfloat16", logits=4 * 128)
    ranks = world(2).run(train, case)
    assert {meta.dtype for rank in ranks for meta in rank["layout"].tensors} == {"float32"}
    expected = plain(Case(models["plain"]))
    assert ranks[0]["norms"] == pytest.approx(expected["norms"], rel=0.05)
    assert ranks[0]["losses"] == pytest.approx(expected["losses"], abs=0.01)


@pytest.mark.parametrize("stage", STAGES)
def test_memory_lent_to_the_host_comes_back_before_the_step(stage: int, models: Any, world: Any) -> None:
    for rank in world(2).run(lent_to_the_host, Case(models["plain"], DeepSpeedOptions(zero_stage=stage))):
        assert rank["before"] > 0
        assert rank["meanwhile"] == 0
        assert rank["step"].grad_norm > 0
