"""Entry module of the broken backends: each module of this package is one family of defects."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from broken.defect import DEFECTS, MANAGER, Defect, place
from rlsdk.interfaces import (
    BackendKind,
    BackendSpec,
    Capability,
    RegisterBackend,
    RegisterComponent,
    hookimpl,
)

for _family in sorted(Path(__file__).parent.glob("*_*.py")):
    if not _family.stem.startswith("_"):
        import_module(f"broken.{_family.stem}")

ROLLOUT_CAPABILITIES = frozenset(
    {
        Capability.SEED,
        Capability.MIN_P,
        Capability.STOP_STRINGS,
        Capability.PROMPT_LOG_PROBS,
        Capability.ABORT,
        Capability.SLEEP,
        Capability.PARTIAL_ROLLOUT,
        Capability.STALE_CACHE,
        Capability.ADAPTER_SYNC,
        Capability.ADAPTER_VERSIONS,
    }
)
TRAIN_CAPABILITIES = frozenset(
    {
        Capability.VALUE_HEAD,
        Capability.SCORE_HEAD,
        Capability.ENTROPY,
        Capability.DISTILLATION,
        Capability.OFFLOAD,
        Capability.EXPORT,
        Capability.PACKING,
        Capability.LORA,
        Capability.ADAPTER_SYNC,
    }
)
RANKS_CAPABILITIES = TRAIN_CAPABILITIES | {Capability.DATA_PARALLEL, Capability.RESHARD_ON_LOAD}


def _of(kind: str) -> Mapping[str, Defect]:
    found = [defect for defect in DEFECTS if defect.kind == kind]
    by_name = {defect.name: defect for defect in found}
    assert len(by_name) == len(found), f"two {kind} defects have one name"
    return by_name


ROLLOUT = _of(BackendKind.ROLLOUT.value)
TRAIN = _of(BackendKind.TRAIN.value)
SHARDING = _of(MANAGER)


@hookimpl
def rlsdk_register_sharding_managers(register: RegisterComponent) -> None:
    for name, defect in SHARDING.items():
        register(name, place(defect.engine), "The generic manager with a defect.")


@hookimpl
def rlsdk_register_backends(register: RegisterBackend) -> None:
    for name, defect in ROLLOUT.items():
        register(
            BackendSpec(
                name=name,
                kind=BackendKind.ROLLOUT,
                engine=place(defect.engine),
                description="The reference engine with a defect.",
                capabilities=ROLLOUT_CAPABILITIES,
                forecast=place(defect.forecast) if defect.forecast else None,
                max_ranks=1,
            )
        )
    for name, defect in TRAIN.items():
        register(
            BackendSpec(
                name=name,
                kind=BackendKind.TRAIN,
                engine=place(defect.engine),
                description="The reference engine, or that of FSDP, with a defect.",
                capabilities=RANKS_CAPABILITIES if defect.ranks else TRAIN_CAPABILITIES,
                dtypes=frozenset({"float32", "bfloat16"}),
                max_ranks=None if defect.ranks else 1,
            )
        )
