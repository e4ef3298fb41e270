"""Settings of `RolloutConformance`: what its test harness reads of it."""

from __future__ import annotations

from typing import ClassVar

from rlsdk.interfaces import BackendKind
from rlsdk.testing.suites.suite import Suite


class RolloutSettings(Suite):
    """A subclass of `RolloutConformance` may set these attributes."""

    kind = BackendKind.ROLLOUT
    model: ClassVar[str | None] = None
    """Folder of a small causal LM with a vocabulary of at least 64 tokens; None: a random Qwen2 with 0.3 million
    parameters, 128 tokens and heads of 32. It is compared in float32 only."""
    tolerance: ClassVar[float] = 1e-4
    """Largest difference of a log-prob from plain transformers on a CPU in float32."""
    max_model_tokens: ClassVar[int] = 512
    max_running: ClassVar[int] = 16
    tp_size: ClassVar[int] = 1
    """Number of workers of the shared engine."""
    tensor_parallel: ClassVar[int] = 2
    """Number of workers of one replica in the requirements of tensor parallelism, for backends that claim it."""
    timeout_s: ClassVar[float] = 120.0
    """Deadline of one call of `generate`."""
    leak_calls: ClassVar[int] = 30
    """Number of calls whose memory is measured, after a third as many that are not."""
    leak_mib: ClassVar[float] = 24.0
    """Largest memory that these calls may add."""
