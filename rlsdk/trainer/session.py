"""Everything a run holds while it lives: the cluster, one worker group per role, and the weights' way between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsdk.cluster import Cluster, PlacementSpec, PoolSpec, WorkerGroup, preset_placement
from rlsdk.config import OptimConfig, RunConfig
from rlsdk.interfaces import (
    BackendSpec,
    Capability,
    ModelSpec,
    OptimSpec,
    Peer,
    RolloutSpec,
    ShardingManager,
    TrainSpec,
    WeightLayout,
)

if TYPE_CHECKING:
    from rlsdk.registry import Registry

TRAIN_HOST = "rlsdk.trainer.hosts:TrainHost"
ROLLOUT_HOST = "rlsdk.trainer.hosts:RolloutHost"


@dataclass(frozen=True, kw_only=True)
class RoleGroup:
    """The worker group of one role, with what its backend claims; what a ShardingManager sees of it."""

    group: WorkerGroup
    spec: BackendSpec
    layout_method: str

    @property
    def backend(self) -> str:
        return self.spec.name

    @property
    def capabilities(self) -> frozenset[str]:
        return frozenset(capability.value for capability in self.spec.capabilities)

    def layouts(self) -> Sequence[WeightLayout]:
        """Of all ranks, in rank order; a rollout rank may deliver to several places."""
        found = self.group.run(self.layout_method)
        return [layout for item in found for layout in (item if isinstance(item, Sequence) else [item])]

    def run(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        return self.group.run(method, *args, timeout_s=timeout_s, **kwargs)

    def run_each(self, method: str, arguments: Sequence[tuple[Any, ...]], timeout_s: float | None = None) -> list[Any]:
        return self.group.run_each(method, arguments, timeout_s=timeout_s)

    def peers(self) -> Sequence[Peer]:
        return self.group.peers()


@dataclass(frozen=True, kw_only=True)
class Session:
    """A running set of workers."""

    config: RunConfig
    cluster: Cluster
    actor: RoleGroup
    rollout: RoleGroup | None = None
    ref: RoleGroup | None = None
    sharding: ShardingManager | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)


def roles_of(config: RunConfig, *, train_only: bool = False) -> list[str]:
    """The roles that a run needs."""
    roles = ["actor"]
    if not train_only:
        roles.append("rollout")
        if config.algorithm.kl_coef > 0:
            roles.append("ref")
    return roles


def placement_of(config: RunConfig, roles: Sequence[str], device: str) -> PlacementSpec:
    """Which pool each role runs in."""
    chosen = config.placement
    if chosen.preset is not None:
        return preset_placement(
            chosen.preset,
            roles,
            num_nodes=chosen.num_nodes,
            devices_per_node=chosen.devices_per_node,
            device=device,
            cpus_per_device=chosen.cpus_per_device,
        )
    pools = tuple(
        PoolSpec(
            name=name,
            devices_per_node=pool.devices_per_node,
            device=device if pool.device == "auto" else pool.device,
            cpus_per_device=chosen.cpus_per_device,
        )
        for name, pool in chosen.pools.items()
    )
    shared = {"ref": chosen.roles.get("ref", chosen.roles.get("actor", ""))}
    return PlacementSpec(pools=pools, roles={role: chosen.roles.get(role) or shared[role] for role in roles})


def optim_spec(optim: OptimConfig, total_steps: int) -> OptimSpec:
    return OptimSpec(
        lr=optim.lr,
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        max_grad_norm=optim.max_grad_norm,
        schedule=optim.schedule,
        warmup_steps=optim.warmup_steps,
        total_steps=max(total_steps, 1),
        min_lr_ratio=optim.min_lr_ratio,
    )


def sft_optim_spec(config: RunConfig) -> OptimSpec:
    """Of supervised training: the run's optimizer at its own learning rate."""
    own = config.train.optim.model_copy(
        update={"lr": config.sft.lr, "warmup_steps": config.sft.warmup_steps, "schedule": "constant"}
    )
    return optim_spec(own, config.sft.steps)


@contextmanager
def open_session(
    config: RunConfig, registry: Registry, *, run_dir: Path, device: str, train_only: bool = False, resuming: bool = False
) -> Iterator[Session]:
    """Starts the workers of a run and takes everything down again, whatever happens inside.

    Raises:
        PlacementError: the cluster cannot give what the configuration asks for.
        ConfigError: an engine refused its part of the configuration.
    """
    roles = roles_of(config, train_only=train_only)
    placement = placement_of(config, roles, device)
    with Cluster.start(
        placement,
        address=config.placement.ray_address,
        timeout_s=config.trainer.timeout_s,
        log_dir=run_dir / "logs",
        seed=config.trainer.seed,
    ) as cluster:
        yield _build(config, registry, cluster, roles, resuming=resuming)


def _build(config: RunConfig, registry: Registry, cluster: Cluster, roles: Sequence[str], *, resuming: bool) -> Session:
    model = ModelSpec(
        path=config.model.path or "",
        revision=config.model.revision,
        dtype=config.model.dtype,
        trust_remote_code=config.model.trust_remote_code,
    )
    warm_start = config.sft.steps > 0 and not resuming
    first_optim = (
        sft_optim_spec(config) if warm_start else optim_spec(config.train.optim, config.trainer.optimizer_steps)
    )
    actor = _train_role(config, registry, cluster, "actor", model, first_optim)
    rollout = ref = manager = None
    if "ref" in roles:
        ref = _train_role(config, registry, cluster, "ref", model, None)
    if "rollout" in roles:
        rollout = _rollout_role(config, registry, cluster, model)
        target = f"{actor.backend}+{rollout.backend}" if config.sharding.manager == "auto" else config.sharding.manager
        manager = registry.sharding_manager(target)(
            actor, rollout, timeout_s=config.trainer.timeout_s, bucket_bytes=config.sharding.bucket_mb << 20
        )
    return Session(config=config, cluster=cluster, actor=actor, rollout=rollout, ref=ref, sharding=manager)


def _train_role(
    config: RunConfig, registry: Registry, cluster: Cluster, role: str, model: ModelSpec, optim: OptimSpec | None
) -> RoleGroup:
    spec = registry.backend("train", config.train.backend)
    train = TrainSpec(
        model=model,
        optim=optim,
        micro_batch_tokens=config.train.micro_batch_tokens,
        micro_batch_rows=config.train.micro_batch_rows,
        activation_checkpointing=config.train.activation_checkpointing,
        init_from_config=config.model.init_from_config,
        options=registry.options(spec, config.train.options),
        engine_kwargs=dict(config.train.engine_kwargs),
    )
    group = cluster.create_group(role, host=TRAIN_HOST, args=(spec.engine, train))
    return RoleGroup(group=group, spec=spec, layout_method="weight_layout")


def _rollout_role(config: RunConfig, registry: Registry, cluster: Cluster, model: ModelSpec) -> RoleGroup:
    spec = registry.backend("rollout", config.rollout.backend)
    rollout = RolloutSpec(
        model=model,
        max_model_tokens=config.max_model_tokens,
        max_running=config.rollout.max_running_samples,
        tp_size=config.rollout.tp_size,
        load_weights=False,
        options=registry.options(spec, config.rollout.options),
        engine_kwargs=dict(config.rollout.engine_kwargs),
    )
    group = cluster.create_group("rollout", host=ROLLOUT_HOST, args=(spec.engine, rollout))
    return RoleGroup(group=group, spec=spec, layout_method="target_layouts")


def can(group: RoleGroup, capability: Capability) -> bool:
    return capability in group.spec.capabilities
