"""The suite of the engine, and engines that a test has for itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlsdk.interfaces import ModelSpec, RankContext, RolloutSpec
from rlsdk.kit.guards.guarded_rollout import GuardedRolloutEngine
from rlsdk.testing import RolloutConformance
from rlsdk_sglang.config import SglangOptions
from rlsdk_sglang.engine import SglangRolloutEngine


class Sglang(RolloutConformance):
    """Runs in processes of its own."""

    backend = "sglang"
    options = SglangOptions(kv_cache_mb=64)
    tolerance = 5e-5


def make_engine(
    folder: Path, *, dtype: str = "float32", context: Mapping[str, Any] | None = None, **spec: Any
) -> GuardedRolloutEngine:
    engine = GuardedRolloutEngine(SglangRolloutEngine())
    fields = {"max_model_tokens": 128, "max_running": 16, "options": Sglang.options, **spec}
    engine.initialize(
        RankContext(role="rollout", **(context or {})),
        RolloutSpec(model=ModelSpec(path=str(folder), dtype=dtype), **fields),
    )
    return engine


def on_gpus(*names: str, nodes: tuple[str, ...] = ()) -> RankContext:
    """A replica with these devices, which nobody has."""
    return RankContext(role="rollout", node=nodes[0] if nodes else "localhost", device="cuda:0", accelerators=names,
                       bundles=tuple(range(len(names))), device_nodes=nodes)  # fmt: skip
