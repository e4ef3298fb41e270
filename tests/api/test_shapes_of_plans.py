"""A known model's shape is planned without a folder or a network, and trained by nobody."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import rlsdk
from rlsdk.interfaces import ConfigError


@pytest.fixture
def of_shape(tmp_path: Path) -> dict[str, Any]:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"{n} + 1", "answer": str(n + 1)}) + "\n" for n in range(20)))
    return {"model": "shape:qwen2.5-7b", "data": str(rows), "reward": "exact", "data.num_eval_rows": 4}


def test_the_plan_has_the_weights_of_the_model(of_shape: dict[str, Any]) -> None:
    plan = rlsdk.plan(**of_shape, hardware="h100:1x8", **{"model.dtype": "bfloat16"})
    assert {role.model for role in plan.roles} == {"shape:qwen2.5-7b"}
    assert plan.reshard is not None
    assert plan.reshard.num_parameters == 7_615_616_512
    assert plan.fits is False, "16 bytes a parameter are more than one H100 has"


def test_a_run_is_refused_before_anything_starts(of_shape: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.path 'shape:qwen2.5-7b': is a shape.*for `rlsdk plan` only"):
        rlsdk.train(**of_shape, **{"trainer.run_dir": str(tmp_path / "runs")})
    assert not (tmp_path / "runs").exists()
