"""TrainConformance: the requirements that every TrainEngine must pass."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from rlsdk.interfaces import BackendKind, Capability
from rlsdk.testing.requirements import unmeasured
from rlsdk.testing.suite import Suite
from rlsdk.testing.train_architectures import ArchitectureRequirements
from rlsdk.testing.train_buffers import BufferRequirements
from rlsdk.testing.train_checkpoints import CheckpointRequirements
from rlsdk.testing.train_engine_isolation import IsolationRequirements
from rlsdk.testing.train_exports import ExportRequirements
from rlsdk.testing.train_gradients import GradientRequirements
from rlsdk.testing.train_half_precision import HalfPrecisionRequirements
from rlsdk.testing.train_idle_steps import IdleStepRequirements
from rlsdk.testing.train_lab import TrainLab
from rlsdk.testing.train_lengths import LengthRequirements
from rlsdk.testing.train_lifetime import LifetimeRequirements
from rlsdk.testing.train_models import ModelRequirements
from rlsdk.testing.train_objectives import ObjectiveRequirements
from rlsdk.testing.train_outputs import OutputRequirements
from rlsdk.testing.train_parallelism import ParallelismRequirements
from rlsdk.testing.train_placement import PlacementRequirements
from rlsdk.testing.train_random_calls import RandomCallRequirements
from rlsdk.testing.train_rank_calls import RankCallRequirements
from rlsdk.testing.train_ranks import RankRequirements
from rlsdk.testing.train_read_only_calls import ReadOnlyRequirements
from rlsdk.testing.train_settings import SettingRequirements
from rlsdk.testing.train_specification import SpecificationRequirements
from rlsdk.testing.train_write_errors import WriteErrorRequirements


class TrainConformance(
    OutputRequirements,
    LengthRequirements,
    ModelRequirements,
    ArchitectureRequirements,
    BufferRequirements,
    HalfPrecisionRequirements,
    GradientRequirements,
    ObjectiveRequirements,
    SettingRequirements,
    IdleStepRequirements,
    ReadOnlyRequirements,
    LifetimeRequirements,
    CheckpointRequirements,
    ExportRequirements,
    WriteErrorRequirements,
    ParallelismRequirements,
    RankRequirements,
    PlacementRequirements,
    SpecificationRequirements,
    RankCallRequirements,
    IsolationRequirements,
    RandomCallRequirements,
    Suite,
):
    """Subclass it with the name of a backend and run pytest.

    Every requirement builds its own engines. They run in this process; those with several ranks run in a world of
    processes that starts once.
    """

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

    test_lora = unmeasured(Capability.LORA)
    test_routed_experts = unmeasured(Capability.ROUTED_EXPERTS)
    test_multimodal = unmeasured(Capability.MULTIMODAL)

    @classmethod
    def make_lab(cls, folder: Path) -> TrainLab:
        return TrainLab(cls, folder)

    @pytest.fixture
    def lab(self, rlsdk_lab: TrainLab) -> TrainLab:
        return rlsdk_lab
