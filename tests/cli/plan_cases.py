"""Plans of a tiny model."""

from __future__ import annotations

from typing import Any

from rlsdk.config import RunConfig, load_config
from rlsdk.planning import RunPlan, make_plan, parse_hardware
from rlsdk.registry import Registry
from rlsdk.trainer.runs.prepare import PreparedRun

TASK = ["--data", "reasoning_gym:chain_sum", "--reward", "reasoning_gym", "--data.max_prompt_tokens", "64",
        "--rollout.max_response_tokens", "64"]  # fmt: skip


def config_of(model: str, *more: str) -> RunConfig:
    return load_config([], ["--model", model, "--model.dtype", "float32", *TASK, *more])


def planned(registry: Registry, model: str, *more: str, hardware: str = "64GiB", **given: Any) -> RunPlan:
    machine = parse_hardware(hardware)
    return make_plan(PreparedRun.of(config_of(model, *more), registry, machine.device), hardware=machine, **given)
