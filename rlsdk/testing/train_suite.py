"""TrainConformance: the requirements that every TrainEngine must pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsdk.interfaces import Capability
from rlsdk.testing.requirements import unmeasured
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
from rlsdk.testing.train_suite_settings import TrainSettings
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
    TrainSettings,
):
    """Subclass it with the name of a backend and run pytest.

    Every requirement builds its own engines. They run in this process; those with several ranks run in a world of
    processes that starts once.
    """

    test_lora = unmeasured(Capability.LORA)
    test_routed_experts = unmeasured(Capability.ROUTED_EXPERTS)
    test_multimodal = unmeasured(Capability.MULTIMODAL)

    @classmethod
    def make_lab(cls, folder: Path) -> TrainLab:
        return TrainLab(cls, folder)

    @pytest.fixture
    def lab(self, rlsdk_lab: TrainLab) -> TrainLab:
        return rlsdk_lab
