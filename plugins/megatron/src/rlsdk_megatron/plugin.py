"""Registers the backend. Imports no engine."""

from __future__ import annotations

from rlsdk.interfaces import BackendKind, BackendSpec, Capability, RegisterBackend, hookimpl


@hookimpl
def rlsdk_register_backends(register: RegisterBackend) -> None:
    register(
        BackendSpec(
            name="megatron",
            interface=(2, 1),
            kind=BackendKind.TRAIN,
            engine="rlsdk_megatron.engine:MegatronTrainEngine",
            options="rlsdk_megatron.config:MegatronOptions",
            forecast="rlsdk_megatron.forecast:forecast",
            description="Megatron-Core: data, tensor, sequence, pipeline and expert parallel training.",
            capabilities=frozenset(
                {
                    Capability.VALUE_HEAD,
                    Capability.SCORE_HEAD,
                    Capability.ENTROPY,
                    Capability.OFFLOAD,
                    Capability.EXPORT,
                    Capability.RESHARD_ON_LOAD,
                    Capability.DATA_PARALLEL,
                    Capability.TENSOR_PARALLEL,
                    Capability.PIPELINE_PARALLEL,
                    Capability.CONTEXT_PARALLEL,
                    Capability.EXPERT_PARALLEL,
                    Capability.LORA,
                    Capability.ADAPTER_SYNC,
                }
            ),
            dtypes=frozenset({"float32", "bfloat16"}),
            architectures=frozenset({"llama", "qwen2", "qwen3", "qwen3_moe"}),
            engine_requires={"megatron-core": ">=0.16,<0.17"},
            install_hint="pip install rlsdk-megatron",
        )
    )
