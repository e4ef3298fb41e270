"""ShardingConformance: the requirements that every ShardingManager must pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

from rlsdk.registry import ComponentKind, Registry, Row
from rlsdk.testing.requirements import Measured
from rlsdk.testing.sharding_faults import SyncFaultRequirements
from rlsdk.testing.sharding_lab import ShardingLab
from rlsdk.testing.sharding_lives import SyncLifeRequirements
from rlsdk.testing.sharding_plans import PlanRequirements
from rlsdk.testing.sharding_quantized import QuantizedRequirements
from rlsdk.testing.sharding_random_layouts import RandomLayoutRequirements
from rlsdk.testing.sharding_syncs import SyncRequirements


class ShardingConformance(
    PlanRequirements,
    SyncRequirements,
    SyncFaultRequirements,
    SyncLifeRequirements,
    QuantizedRequirements,
    RandomLayoutRequirements,
):
    """Subclass it with the name under which a sharding manager is registered (`train+rollout`, with `*` for any).

    A manager plans and syncs; offloading memory is the trainer's task.
    """

    backend: ClassVar[str] = ""
    arguments: ClassVar[dict[str, Any]] = {}
    """Arguments of the manager's constructor, besides the two groups."""
    bucket_bytes: ClassVar[int | None] = None
    """Bucket bound that these arguments set; None: the plan's own."""
    modules: ClassVar[Sequence[ModuleType]] = ()
    device: ClassVar[str] = "cpu"
    kind = ComponentKind.SHARDING_MANAGER

    @classmethod
    def registry(cls) -> Registry:
        registry = Registry.discover()
        for module in cls.modules:
            registry.register_module(module)
        return registry

    @classmethod
    def row(cls) -> Row:
        return cls.registry().row(cls.kind, cls.backend)

    @classmethod
    def make_lab(cls, folder: Path) -> ShardingLab:
        return ShardingLab(cls)

    @pytest.fixture
    def lab(self, rlsdk_lab: ShardingLab) -> ShardingLab:
        return rlsdk_lab

    @pytest.fixture
    def measured(self, request: pytest.FixtureRequest) -> Measured:
        return Measured(request.node.user_properties)
