"""What a run needs against what a backend declares."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsdk.interfaces import (
    BackendKind,
    BackendSpec,
    Capability,
    RegisterBackend,
    UnsupportedCapabilityError,
    hookimpl,
)
from rlsdk.registry import Registry, Requirements, lacks, require

SMALL = BackendSpec(
    name="small",
    kind=BackendKind.ROLLOUT,
    engine="a:B",
    devices=frozenset({"cpu"}),
    dtypes=frozenset({"float32"}),
    architectures=frozenset({"llama"}),
    max_ranks=2,
)
LARGE = BackendSpec(name="large", kind=BackendKind.ROLLOUT, engine="a:B", capabilities=frozenset(Capability))


class Plugin:
    @hookimpl
    def rlsdk_register_backends(self, register: RegisterBackend) -> None:
        register(SMALL)
        register(LARGE)


@pytest.fixture
def registry() -> Registry:
    registry = Registry()
    registry.register_module(Plugin())
    return registry


def test_every_lack_is_named_with_its_field_and_who_can(registry: Registry) -> None:
    needed = Requirements(
        kind=BackendKind.ROLLOUT,
        device="cuda",
        dtype="bfloat16",
        model_type="qwen3",
        num_ranks=4,
        capabilities=frozenset({Capability.MIN_P}),
        because={"device": "placement.device", "min_p": "rollout.min_p"},
    )
    with pytest.raises(UnsupportedCapabilityError) as caught:
        require(needed, "small", registry)
    message = str(caught.value)
    assert "does not run on 'cuda' (but on 'cpu'), needed by placement.device; installed and able: 'large'" in message
    assert "does not compute in 'bfloat16'" in message
    assert "models of type 'qwen3' (but 'llama')" in message
    assert "spans at most 2 processes, not 4" in message
    assert "does not support 'min_p', needed by rollout.min_p" in message
    assert require(needed, "large", registry) is LARGE


def test_nothing_able_is_said_so(registry: Registry) -> None:
    needed = Requirements(kind=BackendKind.ROLLOUT, dtype="float64")
    with pytest.raises(UnsupportedCapabilityError, match="installed and able: none"):
        require(needed, "large", registry)


def test_what_is_not_asked_for_is_not_lacking() -> None:
    assert lacks(Requirements(kind=BackendKind.ROLLOUT), SMALL) == []


@settings(deadline=None)
@given(needed=st.frozensets(st.sampled_from(Capability)), has=st.frozensets(st.sampled_from(Capability)))
def test_the_capabilities_lacking_are_exactly_the_difference(
    needed: frozenset[Capability], has: frozenset[Capability]
) -> None:
    spec = BackendSpec(name="x", kind=BackendKind.TRAIN, engine="a:B", capabilities=has)
    found = lacks(Requirements(kind=BackendKind.TRAIN, capabilities=needed), spec)
    assert {lack.requirement for lack in found} == {capability.value for capability in needed - has}


def test_a_train_backend_without_any_split_uses_one_process() -> None:
    several = Requirements(kind=BackendKind.TRAIN, num_ranks=4, because={"num_ranks": "placement.devices_per_node"})

    class Trainers:
        @hookimpl
        def rlsdk_register_backends(self, register: RegisterBackend) -> None:
            claims = {
                "lone": frozenset({Capability.ENTROPY}),
                "wide": frozenset({Capability.DATA_PARALLEL}),
                "deep": frozenset({Capability.PIPELINE_PARALLEL}),
            }
            for name, claimed in claims.items():
                register(BackendSpec(name=name, kind=BackendKind.TRAIN, engine="a:B", capabilities=claimed))
            register(BackendSpec(name="single", kind=BackendKind.TRAIN, engine="a:B", max_ranks=1))

    registry = Registry()
    registry.register_module(Trainers())
    with pytest.raises(UnsupportedCapabilityError) as caught:
        require(several, "lone", registry)
    assert str(caught.value) == (
        "train backend 'lone' supports neither 'data_parallel' nor another way to use 4 processes, needed by "
        "placement.devices_per_node; installed and able: 'deep', 'wide'"
    )
    assert [lack.message for lack in lacks(several, registry.backend(BackendKind.TRAIN, "single"))] == [
        "spans at most 1 process, not 4"
    ]
    assert lacks(Requirements(kind=BackendKind.TRAIN), registry.backend(BackendKind.TRAIN, "lone")) == []


def test_a_backend_that_takes_no_weights_cannot_be_trained_with() -> None:
    class Frozen:
        @hookimpl
        def rlsdk_register_backends(self, register: RegisterBackend) -> None:
            register(BackendSpec(name="frozen", kind=BackendKind.ROLLOUT, engine="a:B", takes_weights=False))
            register(LARGE)

    registry = Registry()
    registry.register_module(Frozen())
    assert lacks(Requirements(kind=BackendKind.ROLLOUT), registry.backend(BackendKind.ROLLOUT, "frozen")) == []
    with pytest.raises(UnsupportedCapabilityError, match=r"weights of its own .*; installed and able: 'large'"):
        require(Requirements(kind=BackendKind.ROLLOUT, takes_weights=True), "frozen", registry)
