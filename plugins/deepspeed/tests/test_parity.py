"""The same numbers as one process of plain torch, for every stage and split."""

from __future__ import annotations

from typing import Any

import pytest
from comparing import difference
from jobs import Case, lent_to_the_host, plain, train

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
@pytest.mark.parametrize("what", ["calls", "lonely", "recomputed", "tied", "odd", "mixture", "offload"])
def test_other_models_and_calls_equal_one_process_on_two_ranks(what: str, stage: int, models: Any, world: Any) -> None:
    offload = DeepSpeedOptions(zero_stage=stage, offload_optimizer=True, offload_param=stage == 3)
    case = Case(
        models.get(what, models["plain"]),
        offload if what == "offload" else DeepSpeedOptions(zero_stage=stage),
        calls=2 if what == "calls" else 1,
        lonely=what == "lonely",
        checkpointing=what == "recomputed",
    )
    found = difference(world(2).run(train, case), plain(case))
    assert show(f"ZeRO-{stage} x 2, {what}", found) <= EXACT


@pytest.mark.parametrize("stage", STAGES)
def test_bfloat16_passes_stay_near_float32_on_weights_of_float32(stage: int, models: Any, world: Any) -> None:
    case = Case(models["plain"], DeepSpeedOptions(zero_stage=stage), dtype="bfloat16")
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
