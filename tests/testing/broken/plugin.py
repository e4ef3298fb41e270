"""Entry module of the broken backends. Imports no engine, as every entry module should."""

from __future__ import annotations

from broken.defect import Defect
from broken.rollout_defects import ROLLOUT, ROLLOUT_CAPABILITIES
from broken.sharding_defects import SHARDING
from broken.train_defects import RANKS, RANKS_CAPABILITIES, TRAIN, TRAIN_CAPABILITIES
from rlsdk.interfaces import BackendKind, BackendSpec, RegisterBackend, RegisterComponent, hookimpl

__all__ = ["ROLLOUT", "SHARDING", "TRAIN", "Defect"]


@hookimpl
def rlsdk_register_sharding_managers(register: RegisterComponent) -> None:
    for name, defect in SHARDING.items():
        register(name, defect.place, "The generic manager with a defect.")


@hookimpl
def rlsdk_register_backends(register: RegisterBackend) -> None:
    for name, defect in ROLLOUT.items():
        register(
            BackendSpec(
                name=name,
                kind=BackendKind.ROLLOUT,
                engine=defect.place,
                description="The reference engine with a defect.",
                capabilities=ROLLOUT_CAPABILITIES - defect.lacks,
                forecast=f"broken.{defect.forecast}" if defect.forecast else None,
                max_ranks=1,
            )
        )
    for name, defect in TRAIN.items():
        register(
            BackendSpec(
                name=name,
                kind=BackendKind.TRAIN,
                engine=defect.place,
                description="The reference engine, or that of FSDP, with a defect.",
                capabilities=(RANKS_CAPABILITIES if name in RANKS else TRAIN_CAPABILITIES) - defect.lacks,
                dtypes=frozenset({"float32", "bfloat16"}),
                max_ranks=None if name in RANKS else 1,
            )
        )
