"""First-party plugins, name -> distribution: used only for install hints when a name is not found."""

from __future__ import annotations

from collections.abc import Mapping

from rlsdk.interfaces import BackendKind
from rlsdk.registry.row import ComponentKind, Kind

FIRST_PARTY: Mapping[Kind, Mapping[str, str]] = {
    BackendKind.TRAIN: {"fsdp": "rlsdk-fsdp", "megatron": "rlsdk-megatron"},
    BackendKind.ROLLOUT: {"sglang": "rlsdk-sglang", "vllm": "rlsdk-vllm"},
    ComponentKind.DATASET: {"reasoning_gym": "rlsdk-reasoning-gym"},
    ComponentKind.REWARD: {"reasoning_gym": "rlsdk-reasoning-gym"},
}
