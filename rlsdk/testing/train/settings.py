"""Settings of `TrainConformance`: what its test harness reads of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from rlsdk.interfaces import BackendKind
from rlsdk.testing.suites.suite import Suite


class TrainSettings(Suite):
    """A subclass of `TrainConformance` may set these attributes."""

    kind = BackendKind.TRAIN
    model: ClassVar[str | None] = None
    """Folder of a small causal LM with at least 128 tokens; None: a random Qwen2 with 0.3 million parameters. It is
    compared in float32 only."""
    expert_model: ClassVar[str | None] = None
    """Folder of a mixture of experts, for backends that claim expert parallelism; None: a random Qwen3-MoE."""
    tolerance: ClassVar[float] = 1e-4
    """Largest difference of an output from plain transformers on a CPU in float32."""
    step_tolerance: ClassVar[float] = 1e-4
    """Largest difference of a weight after three steps of size 0.01, and largest relative difference of a gradient's
    norm."""
    splits: ClassVar[Mapping[str, Mapping[str, object]]] = {}
    """Value of a parallel capability -> options for this split over `world` ranks. Without an entry, the field of the
    backend's options with the name of the capability (or that name with `_size`) is set to 2."""
    apart: ClassVar[bool] = False
    """Runs single ranks in a separate process too, for an engine that changes its process."""
    world: ClassVar[int] = 2
    """Number of ranks of a split world."""
    leak_steps: ClassVar[int] = 50
    """Number of steps whose memory is measured, after a fifth as many that are not."""
    leak_mib: ClassVar[float] = 24.0
    """Largest memory that these steps may add."""
