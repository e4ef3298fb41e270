"""First-party plugins, name of the backend -> distribution: used only for install hints when a name is not found."""

from __future__ import annotations

from collections.abc import Mapping

from rlsdk.interfaces import BackendKind

FIRST_PARTY: Mapping[str, Mapping[str, str]] = {
    BackendKind.TRAIN: {"fsdp": "rlsdk-fsdp", "megatron": "rlsdk-megatron"},
    BackendKind.ROLLOUT: {"sglang": "rlsdk-sglang", "vllm": "rlsdk-vllm"},
}
