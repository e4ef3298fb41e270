"""Registers the backend. Imports no engine."""

from __future__ import annotations

from rlsdk.interfaces import BackendKind, BackendSpec, Capability, RegisterBackend, hookimpl


@hookimpl
def rlsdk_register_backends(register: RegisterBackend) -> None:
    register(
        BackendSpec(
            name="deepspeed",
            interface=(2, 1),
            kind=BackendKind.TRAIN,
            engine="rlsdk_deepspeed.engine:DeepSpeedTrainEngine",
            options="rlsdk_deepspeed.config:DeepSpeedOptions",
            forecast="rlsdk_deepspeed.forecast:forecast",
            description="DeepSpeed ZeRO 1, 2 and 3, one process per device.",
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
                    Capability.PACKING,
                    Capability.LORA,
                    Capability.ADAPTER_SYNC,
                }
            ),
            dtypes=frozenset({"float32", "bfloat16"}),
            engine_requires={"deepspeed": ">=0.19,<0.20"},
            install_hint="pip install rlsdk-deepspeed",
        )
    )
