"""ShardingConformance: the requirements that every ShardingManager must pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsdk.testing.sharding.lab import ShardingLab
from rlsdk.testing.sharding.requirements.faults import SyncFaultRequirements
from rlsdk.testing.sharding.requirements.plans import PlanRequirements
from rlsdk.testing.sharding.requirements.quantized import QuantizedRequirements
from rlsdk.testing.sharding.requirements.random_layouts import RandomLayoutRequirements
from rlsdk.testing.sharding.requirements.random_syncs import SyncLifeRequirements
from rlsdk.testing.sharding.requirements.syncs import SyncRequirements
from rlsdk.testing.sharding.settings import ShardingSettings
from rlsdk.testing.suites.requirements import Measured


class ShardingConformance(
    PlanRequirements,
    SyncRequirements,
    SyncFaultRequirements,
    SyncLifeRequirements,
    QuantizedRequirements,
    RandomLayoutRequirements,
    ShardingSettings,
):
    """Subclass it with the name under which a sharding manager is registered (`train+rollout`, with `*` for any).

    A manager plans and syncs; offloading memory is the trainer's task.
    """

    @classmethod
    def make_lab(cls, folder: Path) -> ShardingLab:
        return ShardingLab(cls)

    @pytest.fixture
    def lab(self, rlsdk_lab: ShardingLab) -> ShardingLab:
        return rlsdk_lab

    @pytest.fixture
    def measured(self, request: pytest.FixtureRequest) -> Measured:
        return Measured(request.node.user_properties)
