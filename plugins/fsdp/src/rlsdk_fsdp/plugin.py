"""Registers the backend. Imports no engine."""

from __future__ import annotations

from rlsdk.interfaces import BackendKind, BackendSpec, Capability, RegisterBackend, hookimpl


@hookimpl
def rlsdk_register_backends(register: RegisterBackend) -> None:
    register(
        BackendSpec(
            name="fsdp",
            interface=(2, 1),
            kind=BackendKind.TRAIN,
            engine="rlsdk_fsdp.engine:FsdpTrainEngine",
            options="rlsdk_fsdp.config:FsdpOptions",
            forecast="rlsdk_fsdp.forecast:forecast",
            description="torch FSDP2: full and hybrid sharding, one process per device.",
            capabilities=frozenset(
                {
                    Capability.VALUE_HEAD,
                    Capability.SCORE_HEAD,
                    Capability.ENTROPY,
                    Capability.DISTILLATION,
                    Capability.OFFLOAD,
                    Capability.EXPORT,
                    Capability.RESHARD_ON_LOAD,
                    Capability.DATA_PARALLEL,
                    Capability.CONTEXT_PARALLEL,
                    Capability.PACKING,
                    Capability.LORA,
                    Capability.ADAPTER_SYNC,
                }
            ),
            dtypes=frozenset({"float32", "bfloat16"}),
            engine_requires={"torch": ">=2.11,<2.16"},
            install_hint="pip install rlsdk-fsdp",
        )
    )
