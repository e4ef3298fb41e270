from __future__ import annotations

import json
from pathlib import Path

import pytest
from plan_cases import config_of

from rlsdk.config import dump_config
from rlsdk.registry import Registry
from rlsdk.testing.process.models import write_tiny_model


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry.discover()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture
def finished_run(tmp_path: Path, model: str) -> Path:
    (tmp_path / "config.yaml").write_text(dump_config(config_of(model, "--placement.device", "cpu")))
    line = {"time/rollout_s": 2.0, "time/update_s": 4.0, "time/sync_s": 0.5, "time/log_probs_s": 1.0,
            "time/other_s": 0.1, "time/step_s": 7.6, "throughput/tokens_per_s": 100.0,
            "response/tokens_mean": 25.0}  # fmt: skip
    steps = [{"step": 1, **line, "time/rollout_s": 99.0}, *({"step": step, **line} for step in (2, 3, 4))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    return tmp_path
