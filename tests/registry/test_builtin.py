"""The built-ins keep what they promise: every target is there, every claimed ability is implemented."""

from __future__ import annotations

import pytest

from rlsdk.interfaces import BackendKind, Capability, RolloutEngine, TrainEngine
from rlsdk.registry import ComponentKind, Registry, Row

ROWS = [row for row in Registry.discover().rows() if row.source.distribution == "rlsdk"]
METHODS = {
    Capability.OFFLOAD: ("offload", "onload"),
    Capability.EXPORT: ("save_pretrained",),
    Capability.ABORT: ("abort",),
    Capability.SLEEP: ("sleep", "wake"),
    Capability.PARTIAL_ROLLOUT: ("pause", "resume"),
}


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry.discover()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.kind}-{row.name}")
def test_every_built_in_can_be_imported(row: Row, registry: Registry) -> None:
    assert row.state.usable, row.reason
    if isinstance(row.kind, ComponentKind):
        assert callable(registry.component(row.kind, row.name))
    elif isinstance(row.kind, BackendKind):
        spec = registry.backend(row.kind, row.name)
        assert registry.load_engine(spec)
        registry.load_options(spec)


@pytest.mark.parametrize(("kind", "base"), [(BackendKind.TRAIN, TrainEngine), (BackendKind.ROLLOUT, RolloutEngine)])
def test_a_claimed_ability_is_a_method_that_the_engine_has_itself(
    kind: BackendKind, base: type, registry: Registry
) -> None:
    for spec in registry.backends(kind):
        engine = registry.load_engine(spec)
        for capability, names in METHODS.items():
            own = [name for name in names if getattr(engine, name, None) is not getattr(base, name, None)]
            assert own == (list(names) if capability in spec.capabilities else []), (spec.name, capability)


def test_the_generic_sharding_manager_serves_every_pair(registry: Registry) -> None:
    generic = registry.component(ComponentKind.SHARDING_MANAGER, "*+*")
    assert registry.sharding_manager("torch", "transformers") is generic
