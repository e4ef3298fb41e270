"""First-party plugins, name -> distribution: for install hints when a name is not found, and for what
`rlsdk init` chooses: the first of a row that is installed."""

from __future__ import annotations

from collections.abc import Mapping

from rlsdk.interfaces import BackendKind
from rlsdk.registry.row import ComponentKind, Kind

FIRST_PARTY: Mapping[Kind, Mapping[str, str]] = {
    BackendKind.TRAIN: {"fsdp": "rlsdk-fsdp", "megatron": "rlsdk-megatron", "deepspeed": "rlsdk-deepspeed"},
    BackendKind.ROLLOUT: {"vllm": "rlsdk-vllm", "sglang": "rlsdk-sglang"},
    ComponentKind.DATASET: {"reasoning_gym": "rlsdk-reasoning-gym", "verifiers": "rlsdk-verifiers"},
    ComponentKind.REWARD: {"reasoning_gym": "rlsdk-reasoning-gym"},
    ComponentKind.ENVIRONMENT: {"mcp": "rlsdk-mcp", "openenv": "rlsdk-openenv"},
}
