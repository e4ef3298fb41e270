"""The suite of each mode that the engine runs in, and what its tests look at inside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlsdk.interfaces import AdapterSpec, ModelSpec, RankContext, RlsdkError, RolloutSpec
from rlsdk.kit.guards.guarded_rollout import GuardedRolloutEngine
from rlsdk.testing import RolloutConformance
from rlsdk.testing.rollout.lab import RolloutLab
from rlsdk_vllm.config import VllmOptions
from rlsdk_vllm.engine import VllmRolloutEngine


class InProcess(RolloutConformance):
    """Steps vLLM in this process."""

    backend = "vllm"
    options = VllmOptions(kv_cache_mb=64)
    tolerance = 2e-5


class Asynchronous(InProcess):
    """vLLM runs by itself, in a process beside this one."""

    options = VllmOptions(kv_cache_mb=64, asynchronous=True)


def make_engine(
    folder: Path,
    *,
    dtype: str = "float32",
    context: Mapping[str, Any] | None = None,
    adapter: AdapterSpec | None = None,
    **spec: Any,
) -> GuardedRolloutEngine:
    """An engine that a test has for itself."""
    engine = GuardedRolloutEngine(VllmRolloutEngine())
    fields = {"max_model_tokens": 128, "max_running": 16, "options": InProcess.options, **spec}
    engine.initialize(
        RankContext(role="rollout", **(context or {})),
        RolloutSpec(model=ModelSpec(path=str(folder), dtype=dtype, adapter=adapter), **fields),
    )
    return engine


def worker_of(engine: Any) -> Any:
    """vLLM's worker, in this process."""
    return engine.engine.engine._engine.model_executor.driver_worker.worker


def ends_what_runs(lab: RolloutLab, engine: GuardedRolloutEngine) -> None:
    """Closes an engine in the middle of a call, whose caller is told, as is the next."""

    async def closed_midway() -> None:
        task = await lab.paused_midway([lab.ask("x", [5, 6], 3, max_tokens=110)], engine)
        engine.close()
        with pytest.raises(RlsdkError, match="the engine was closed"):
            await task

    lab.wait(closed_midway())
    with pytest.raises(RlsdkError, match="after the engine was closed"):
        lab.run([lab.ask("x", [5])], engine)
