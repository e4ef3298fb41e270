"""What a role needs of its backend, and which field of the configuration asks for it."""

from __future__ import annotations

from collections.abc import Iterator

from rlsdk.config.derived.roles import HEAD_CAPABILITY, Role, is_own_reference, needed_roles
from rlsdk.config.sections.engines import PlacementConfig, PoolConfig
from rlsdk.config.sections.role_kinds import ACTOR, TEACHER, base_role, kind_of
from rlsdk.config.sections.schema import RunConfig
from rlsdk.interfaces import Capability
from rlsdk.interfaces.settings import ReplicaSize, shared
from rlsdk.registry import Requirements


def role_requirements(
    config: RunConfig,
    role: Role,
    model_type: str | None,
    device: str | None,
    num_devices: int,
    *,
    leaves_model: bool = False,
) -> Requirements:
    """What a role needs of its backend, and which field asks for it.

    Args:
        config: the run.
        role: of the run.
        model_type: of the role's `config.json`; None: not asked for.
        device: `cpu` or `cuda`, what `placement.device: auto` came out as.
        num_devices: of the role.
        leaves_model: the command ends with a model folder that the actor writes (`rlsdk sft`, `reward-model`, `dpo`).
    """
    capabilities = dict(_capabilities(config, role))
    if config.learns_by_divergence and not role.is_rollout and base_role(role.name) in (ACTOR, TEACHER):
        capabilities[Capability.DISTILLATION] = "algorithm.distillation.objective"
    if role.is_rollout and base_role(role.name) == TEACHER:
        capabilities[Capability.PROMPT_LOG_PROBS] = role.fields["backend"]
    if role.name == ACTOR and (field := _exporting_field(config, role, leaves_model=leaves_model)):
        capabilities[Capability.EXPORT] = field
    devices = "placement.pools" if config.placement.preset is None else "placement.devices_per_node"
    because = {
        "device": "placement.device",
        "dtype": role.fields["dtype"],
        "model_type": role.fields["path"],
        "num_ranks": role.fields["tp_size"] if role.is_rollout else devices,
    }
    return Requirements(
        kind=role.kind,
        device=device_of(config.placement, role.name, device),
        dtype=role.model.dtype,
        model_type=model_type,
        num_ranks=role.devices_per_rank if role.is_rollout else num_devices,
        takes_weights=role.is_rollout and not role.has_own_weights,
        capabilities=frozenset(capabilities),
        because=because | {capability.value: field for capability, field in capabilities.items()},
    )


def _capabilities(config: RunConfig, role: Role) -> Iterator[tuple[Capability, str]]:
    """Capabilities that a role needs from its backend, and the field that causes each."""
    if role.model.adapter is not None:
        if not role.is_rollout:
            yield Capability.LORA, "model.lora.rank"
        if config.model.lora.sync == "adapter":
            yield Capability.ADAPTER_SYNC, "model.lora.sync"
    rollout = config.rollout
    if role.has_own_weights:
        if role.devices_per_rank > 1:
            yield Capability.TENSOR_PARALLEL, role.fields["tp_size"]
    elif role.is_rollout:
        if rollout.min_p > 0:
            yield Capability.MIN_P, "rollout.min_p"
        for measure in config.eval.measures():
            if measure.config.min_p > 0:
                yield Capability.MIN_P, f"{measure.field}.min_p"
        if rollout.stop_strings:
            yield Capability.STOP_STRINGS, "rollout.stop_strings"
        # A backend claims that it can use several devices; its engine knows along which axes.
        for field, size in shared(rollout, ReplicaSize).items():
            if size > 1:
                yield Capability.TENSOR_PARALLEL, f"rollout.{field}"
                break
    elif role.model.head in HEAD_CAPABILITY:
        yield HEAD_CAPABILITY[role.model.head], role.fields["backend"]
    elif role.is_trained and config.algorithm.entropy_coef:
        yield Capability.ENTROPY, "algorithm.entropy_coef"
    elif role.is_trained and config.algorithm.entropy_share is not None:
        yield Capability.ENTROPY, "algorithm.entropy_share"


def _exporting_field(config: RunConfig, role: Role, *, leaves_model: bool) -> str | None:
    """The field because of which the actor must be able to export a model, or None. `rlsdk train` can save checkpoints
    without one."""
    if leaves_model:
        return role.fields["backend"]
    # The reference policy is built from the result of the warm start.
    kinds = [kind_of(name) for name in needed_roles(config)]
    copied = [kind for kind in kinds if kind.starts_as_policy and getattr(config, kind.section).path is None]
    if config.sft.is_asked and copied and not is_own_reference(config):
        return "sft.steps" if config.sft.epochs is None else "sft.epochs"
    return None


def devices_of(placement: PlacementConfig, role: str) -> int | None:
    """Number of devices of a role, if the configuration says it without assigning devices."""
    if placement.preset is None:
        pool = _pool_of(placement, role)
        return None if pool is None else sum(pool.devices_per_node)
    return placement.num_nodes * placement.devices_per_node if placement.preset == "colocate_all" else None


def _pool_of(placement: PlacementConfig, role: str) -> PoolConfig | None:
    """The pool of a role if pools are given; a role without a pool shares the actor's."""
    given = placement.roles
    name = given.get(role) or given.get(base_role(role)) or given.get(ACTOR)
    return placement.pools.get(name) if name is not None else None


def device_of(placement: PlacementConfig, role: str, device: str | None) -> str | None:
    """Device of a role: its pool's, the placement's, or the resolved value of `auto`."""
    pool = _pool_of(placement, role)
    if pool is not None and pool.device != "auto":
        return pool.device
    return device if placement.device == "auto" else placement.device
