"""TrainConformance: the requirements that every TrainEngine must pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsdk.interfaces import Capability
from rlsdk.testing.suites.requirements import unmeasured
from rlsdk.testing.train.lab import TrainLab
from rlsdk.testing.train.requirements.adapters import AdapterRequirements
from rlsdk.testing.train.requirements.architectures import ArchitectureRequirements
from rlsdk.testing.train.requirements.buffers import BufferRequirements
from rlsdk.testing.train.requirements.checkpoints import CheckpointRequirements
from rlsdk.testing.train.requirements.distillation import DistillationRequirements
from rlsdk.testing.train.requirements.engine_isolation import IsolationRequirements
from rlsdk.testing.train.requirements.exports import ExportRequirements
from rlsdk.testing.train.requirements.gradients import GradientRequirements
from rlsdk.testing.train.requirements.half_precision import HalfPrecisionRequirements
from rlsdk.testing.train.requirements.idle_steps import IdleStepRequirements
from rlsdk.testing.train.requirements.lengths import LengthRequirements
from rlsdk.testing.train.requirements.lifetime import LifetimeRequirements
from rlsdk.testing.train.requirements.models import ModelRequirements
from rlsdk.testing.train.requirements.objectives import ObjectiveRequirements
from rlsdk.testing.train.requirements.outputs import OutputRequirements
from rlsdk.testing.train.requirements.parallelism import ParallelismRequirements
from rlsdk.testing.train.requirements.placement import PlacementRequirements
from rlsdk.testing.train.requirements.random_calls import RandomCallRequirements
from rlsdk.testing.train.requirements.rank_calls import RankCallRequirements
from rlsdk.testing.train.requirements.ranks import RankRequirements
from rlsdk.testing.train.requirements.read_only_calls import ReadOnlyRequirements
from rlsdk.testing.train.requirements.settings import SettingRequirements
from rlsdk.testing.train.requirements.specification import SpecificationRequirements
from rlsdk.testing.train.requirements.write_errors import WriteErrorRequirements
from rlsdk.testing.train.settings import TrainSettings


class TrainConformance(
    OutputRequirements,
    DistillationRequirements,
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
    AdapterRequirements,
    TrainSettings,
):
    """Subclass it with the name of a backend and run pytest.

    Every requirement builds its own engines. They run in this process; those with several ranks run in a world of
    processes that starts once.
    """

    test_routed_experts = unmeasured(Capability.ROUTED_EXPERTS)
    test_multimodal = unmeasured(Capability.MULTIMODAL)

    @classmethod
    def make_lab(cls, folder: Path) -> TrainLab:
        return TrainLab(cls, folder)

    @pytest.fixture
    def lab(self, rlsdk_lab: TrainLab) -> TrainLab:
        return rlsdk_lab
