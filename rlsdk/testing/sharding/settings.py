"""Settings of `ShardingConformance`: what its test harness reads of it."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, ClassVar

from rlsdk.registry import ComponentKind, Registry, Row


class ShardingSettings:
    """A subclass of `ShardingConformance` may set these attributes."""

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
