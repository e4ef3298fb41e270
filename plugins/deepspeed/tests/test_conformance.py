"""The engine holds all that it claims: with ZeRO 2, and with the other stages what ranks, shards and checkpoints are
asked for. Adapters of ZeRO 1, which holds weights as ZeRO 2 does, are in `test_adapter`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from rlsdk.testing import TrainConformance
from rlsdk.testing.train.lab import TrainLab
from rlsdk.testing.train.requirements.adapters import AdapterRequirements
from rlsdk.testing.train.requirements.checkpoints import CheckpointRequirements
from rlsdk.testing.train.requirements.distillation import DistillationRequirements
from rlsdk.testing.train.requirements.parallelism import ParallelismRequirements
from rlsdk.testing.train.requirements.placement import PlacementRequirements
from rlsdk.testing.train.requirements.rank_calls import RankCallRequirements
from rlsdk.testing.train.requirements.ranks import RankRequirements
from rlsdk.testing.train.settings import TrainSettings


@pytest.mark.filterwarnings("ignore")  # DeepSpeed and torch warn of what each makes of the other
class TestDeepSpeed(TrainConformance):
    backend = "deepspeed"


class OnRanks(
    CheckpointRequirements,
    ParallelismRequirements,
    RankRequirements,
    PlacementRequirements,
    RankCallRequirements,
    TrainSettings,
):
    backend = "deepspeed"
    # Asks for a suite that has requirements of every capability.
    test_registration_capabilities = None

    @classmethod
    def make_lab(cls, folder: Path) -> TrainLab:
        return TrainLab(cls, folder)

    @pytest.fixture
    def lab(self, rlsdk_lab: TrainLab) -> TrainLab:
        return rlsdk_lab


@pytest.mark.filterwarnings("ignore")
class TestZero1OnRanks(OnRanks):
    options: ClassVar[Mapping[str, object]] = {"zero_stage": 1}


@pytest.mark.filterwarnings("ignore")
class TestZero3OnRanks(OnRanks, AdapterRequirements, DistillationRequirements):
    options: ClassVar[Mapping[str, object]] = {"zero_stage": 3}


del TrainConformance
