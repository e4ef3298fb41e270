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
from rlsdk.testing.train_checkpoints import CheckpointRequirements
from rlsdk.testing.train_engine_isolation import IsolationRequirements
from rlsdk.testing.train_exports import ExportRequirements
from rlsdk.testing.train_gradients import GradientRequirements
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
    """Subclass it with the name of a backend; a run of pytest does the rest.

    Every requirement builds engines of its own. They run in this process; those about more than one rank in a world of
    processes that starts once.
    """

    kind = BackendKind.TRAIN
    model: ClassVar[str | None] = None
    """Folder of a small causal LM of 128 tokens at least; None: a random Qwen2 of 0.3 million parameters. Only float32
    is compared."""
    expert_model: ClassVar[str | None] = None
    """The same of a mixture of experts, for backends that claim expert parallelism; None: a random Qwen3-MoE."""
    tolerance: ClassVar[float] = 1e-4
    """Largest difference of an output from plain transformers on a CPU, float32."""
    step_tolerance: ClassVar[float] = 1e-4
    """Largest difference of a weight after three steps of size 0.01, and of a gradient's norm, relative."""
    splits: ClassVar[Mapping[str, Mapping[str, object]]] = {}
    """A parallel capability's value -> options of a world of `world` ranks that is split so. Without: the field of the
    backend's options that is called like the capability (or with `_size` after it) is set to 2."""
    apart: ClassVar[bool] = False
    """Runs single ranks in a process of their own too: for an engine that changes the process it is in."""
    world: ClassVar[int] = 2
    """Ranks of a split world."""
    leak_steps: ClassVar[int] = 50
    """Steps whose memory is counted, after a fifth as many that are not."""
    leak_mib: ClassVar[float] = 24.0
    """Most memory that those steps may add."""

    test_lora = unmeasured(Capability.LORA)
    test_routed_experts = unmeasured(Capability.ROUTED_EXPERTS)
    test_multimodal = unmeasured(Capability.MULTIMODAL)

    @classmethod
    def make_lab(cls, folder: Path) -> TrainLab:
        return TrainLab(cls, folder)

    @pytest.fixture
    def lab(self, rlsdk_lab: TrainLab) -> TrainLab:
        return rlsdk_lab
