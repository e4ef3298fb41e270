"""`model.dtype: auto`: bfloat16 where the actor is on a GPU, float32 on a CPU."""

from __future__ import annotations

import pytest

from rlsdk.config import load_config, with_dtype
from rlsdk.trainer.roles.placement import roles

BASE = ["--model", "m", "--data", "rows.jsonl", "--reward", "gsm8k"]
POOLS = ["--placement.preset", "null", "--placement.roles", "{actor: one, rollout: two}", "--placement.pools"]


@pytest.mark.parametrize(
    ("flags", "device", "expected"),
    [
        ([], "cpu", "float32"),
        ([], "cuda", "bfloat16"),
        ([], None, "float32"),
        (["--placement.device", "cuda"], None, "bfloat16"),
        (["--placement.device", "cpu"], "cuda", "float32"),
        (["--model.dtype", "float32"], "cuda", "float32"),
        ([*POOLS, "{one: {devices_per_node: [1], device: cuda}, two: {devices_per_node: [1], device: cpu}}"], "cpu",
         "bfloat16"),
        ([*POOLS, "{one: {devices_per_node: [1], device: cpu}, two: {devices_per_node: [1], device: cuda}}"], "cuda",
         "float32"),
    ],
)  # fmt: skip
def test_auto_follows_the_actors_device(flags: list[str], device: str | None, expected: str) -> None:
    config = load_config([], [*BASE, *flags])
    assert with_dtype(config, device).model.dtype == expected
    if device is not None:
        assert {role.model.dtype for role in roles(config, device)} == {expected}
