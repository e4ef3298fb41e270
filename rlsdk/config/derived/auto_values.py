"""What `auto` comes out as, once devices, models and backends are known."""

from __future__ import annotations

from collections.abc import Collection

from rlsdk.config.sections.role_kinds import ACTOR
from rlsdk.config.sections.schema import RunConfig
from rlsdk.interfaces import Capability

CHECKPOINTED_PARAMETERS = 1_000_000_000
"""From this size on, activations of 16,384 tokens, the default limit of a pass, take tens of GB."""


def with_dtype(config: RunConfig, device: str | None) -> RunConfig:
    """The same with `model.dtype: auto` decided.

    Args:
        config: of the run.
        device: `cpu` or `cuda`, what `placement.device: auto` came out as; None: as for a CPU, where it is auto.
    """
    if config.model.dtype != "auto":
        return config
    pool = config.placement.pools.get(config.placement.roles.get(ACTOR, ""))
    kind = config.placement.device if pool is None or pool.device == "auto" else pool.device
    dtype = "bfloat16" if (device if kind == "auto" else kind) == "cuda" else "float32"
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})


def with_checkpointing(config: RunConfig, device: str, num_parameters: int | None) -> RunConfig:
    """The same with `train.activation_checkpointing: auto` decided.

    Args:
        config: of the run.
        device: `cpu` or `cuda`, which the actor runs on.
        num_parameters: of the policy; None: unknown, as for a small one.
    """
    if config.train.activation_checkpointing != "auto":
        return config
    chosen = device == "cuda" and (num_parameters or 0) >= CHECKPOINTED_PARAMETERS
    return config.model_copy(update={"train": config.train.model_copy(update={"activation_checkpointing": chosen})})


def with_adapter_sync(config: RunConfig, capabilities: Collection[frozenset[Capability]]) -> RunConfig:
    """The same with `model.lora.sync: auto` decided.

    Args:
        config: of the run.
        capabilities: of the train and the rollout backend.
    """
    if config.model.lora.sync != "auto" or not config.model.lora.rank:
        return config
    able = all(Capability.ADAPTER_SYNC in found for found in capabilities) and not goes_on_under_new_weights(config)
    lora = config.model.lora.model_copy(update={"sync": "adapter" if able else "merged"})
    return config.model_copy(update={"model": config.model.model_copy(update={"lora": lora})})


def samples_by_version(config: RunConfig, capabilities: Collection[Capability]) -> bool:
    """Whether the groups of each step are sampled under a version of the adapter that they name, while newer ones are
    published.

    Args:
        config: of the run.
        capabilities: of the rollout backend.
    """
    apart = config.schedule.overlaps and config.model.lora.rank and config.model.lora.sync == "adapter"
    return bool(apart) and Capability.ADAPTER_VERSIONS in capabilities


def goes_on_under_new_weights(config: RunConfig) -> bool:
    """Whether samples go on under weights that came while they ran, which an adapter's never do."""
    return config.schedule.on_new_weights != "drain"
