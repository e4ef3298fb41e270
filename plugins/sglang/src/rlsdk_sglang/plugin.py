"""Registers the backend. Imports no engine."""

from __future__ import annotations

from rlsdk.interfaces import BackendKind, BackendSpec, Capability, LogProbKind, RegisterBackend, hookimpl


@hookimpl
def rlsdk_register_backends(register: RegisterBackend) -> None:
    register(
        BackendSpec(
            name="sglang",
            interface=(2, 1),
            kind=BackendKind.ROLLOUT,
            engine="rlsdk_sglang.engine:SglangRolloutEngine",
            options="rlsdk_sglang.config:SglangOptions",
            forecast="rlsdk_sglang.forecast:forecast",
            description="SGLang: radix cache, continuous batching, workers in processes of their own.",
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
            engine_requires={"sglang": ">=0.5.23,<0.5.24"},
            install_hint="pip install rlsdk-sglang  # without a GPU: see plugins/sglang/README.md",
        )
    )
