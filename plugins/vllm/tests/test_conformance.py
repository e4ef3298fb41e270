"""The engine holds all that it claims."""

from __future__ import annotations

from rlsdk.testing import RolloutConformance


class TestVllm(RolloutConformance):
    backend = "vllm"
    options = {"kv_cache_mb": 64}  # noqa: RUF012 - as an author would write it


del RolloutConformance
