"""Everything a run holds while it lives: the cluster, one worker group per role, and the weights' way between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlsdk.cluster import Cluster, PlacementSpec, PoolSpec, WorkerGroup, preset_placement
from rlsdk.config import OptimConfig, RunConfig, backend_options
from rlsdk.interfaces import (
    BackendKind,
    BackendSpec,
    CheckpointError,
    ConfigError,
    ModelSpec,
    OptimSpec,
    Peer,
    RolloutSpec,
    ShardingManager,
    TrainSpec,
    WeightLayout,
)
from rlsdk.sharding.transports import allowed_transports
from rlsdk.trainer.checkpoint import older_whole
from rlsdk.trainer.hosts import EngineOptions

if TYPE_CHECKING:
    from rlsdk.registry import Registry

PRELOAD = ("transformers.modeling_utils",)
"""What nearly every engine imports, and imports for longest: workers begin with it before they know their role."""
TRAIN_HOST = "rlsdk.trainer.hosts:TrainHost"
ROLLOUT_HOST = "rlsdk.trainer.hosts:RolloutHost"


@dataclass(frozen=True, kw_only=True)
class RoleGroup:
    """The worker group of one role, with what its backend claims; what a ShardingManager sees of it."""

    group: WorkerGroup
    spec: BackendSpec

    @property
    def backend(self) -> str:
        return self.spec.name

    @property
    def capabilities(self) -> frozenset[str]:
        return frozenset(capability.value for capability in self.spec.capabilities)

    def layouts(self) -> Sequence[WeightLayout]:
        """Of all training ranks, in rank order."""
        found: list[WeightLayout] = self.group.run("weight_layout")
        return found

    def run(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        return self.group.run(method, *args, timeout_s=timeout_s, **kwargs)

    def run_each(self, method: str, arguments: Sequence[tuple[Any, ...]], timeout_s: float | None = None) -> list[Any]:
        return self.group.run_each(method, arguments, timeout_s=timeout_s)

    def peers(self) -> Sequence[Peer]:
        return self.group.peers()


@dataclass(frozen=True, kw_only=True)
class Session:
    """A running set of workers that trains only: `rlsdk sft`."""

    config: RunConfig
    cluster: Cluster
    actor: RoleGroup


@dataclass(frozen=True, kw_only=True)
class RlSession(Session):
    """A running set of workers that samples and trains."""

    rollout: RoleGroup
    manager: ShardingManager
    ref: RoleGroup | None = None
    """The frozen policy that the KL is measured from, where one is asked for."""


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
            devices={str(role): count for role, count in chosen.devices.items()},
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
    given: Mapping[str, str] = {str(role): pool for role, pool in chosen.roles.items()}
    # A role that was given no pool runs beside the actor: the reference has its shape and takes turns with it.
    return PlacementSpec(pools=pools, roles={role: given.get(role, given["actor"]) for role in roles})


def role_devices(config: RunConfig, device: str, *, train_only: bool = False) -> dict[str, int]:
    """How many devices each role gets.

    Raises:
        ConfigError: the placement has fewer devices than pools.
    """
    placement = placement_of(config, roles_of(config, train_only=train_only), device)
    sizes = {pool.name: sum(pool.devices_per_node) for pool in placement.pools}
    return {role: sizes[pool] for role, pool in placement.roles.items()}


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


def resolve_device(config: RunConfig) -> str:
    """`cpu` or `cuda` for a placement that leaves it open: what this machine has. Name it when the machine that starts
    the run is not like those that carry it."""
    if config.placement.device != "auto":
        return config.placement.device
    return "cuda" if Path("/dev/nvidia0").exists() else "cpu"


def model_spec(config: RunConfig, path: str | None = None) -> ModelSpec:
    return ModelSpec(
        path=path or config.model.path or "",
        revision=config.model.revision,
        dtype=config.model.dtype,
        trust_remote_code=config.model.trust_remote_code,
    )


def start_cluster(
    config: RunConfig, registry: Registry, roles: Sequence[str], *, device: str, run_dir: Path
) -> Cluster:
    """Takes the devices that the roles need, or fails saying what is missing; use it as a context manager.

    From here on this process computes on one thread: the processors belong to the workers.
    """
    torch.set_num_threads(1)
    return Cluster.start(
        placement_of(config, roles, device),
        address=config.placement.ray_address,
        timeout_s=config.trainer.timeout_s,
        log_dir=run_dir / "logs",
        seed=config.trainer.seed,
        preload=[TRAIN_HOST.partition(":")[0], *_engine_modules(config, registry), *PRELOAD],
        interpreters=_interpreters(config, registry, roles),
    )


def _interpreters(config: RunConfig, registry: Registry, roles: Sequence[str]) -> dict[str, str]:
    """Of the roles whose backend lives in an environment of its own."""
    train = registry.isolation(registry.backend(BackendKind.TRAIN, config.train.backend))
    rollout = registry.isolation(registry.backend(BackendKind.ROLLOUT, config.rollout.backend))
    of_role = {role: rollout if role == "rollout" else train for role in roles}
    return {role: isolation.python for role, isolation in of_role.items() if isolation is not None}


def _engine_modules(config: RunConfig, registry: Registry) -> list[str]:
    """Where the engines' classes are."""
    train = registry.backend(BackendKind.TRAIN, config.train.backend)
    rollout = registry.backend(BackendKind.ROLLOUT, config.rollout.backend)
    return [spec.engine.partition(":")[0] for spec in (train, rollout)]


def train_spec(
    config: RunConfig, registry: Registry, backend: BackendSpec, model: ModelSpec, optim: OptimSpec | None
) -> TrainSpec:
    """What a train engine is built from."""
    return TrainSpec(
        model=model,
        optim=optim,
        micro_batch_tokens=config.train.micro_batch_tokens,
        micro_batch_rows=config.train.micro_batch_rows,
        activation_checkpointing=config.train.activation_checkpointing,
        init_from_config=config.model.init_from_config,
        options=backend_options(backend, config.train.options, registry),
        engine_kwargs=dict(config.train.engine_kwargs),
    )


def rollout_spec(
    config: RunConfig, registry: Registry, backend: BackendSpec, *, load_weights: bool = False
) -> RolloutSpec:
    """What a rollout engine is built from."""
    return RolloutSpec(
        model=model_spec(config),
        max_model_tokens=config.max_model_tokens,
        max_running=config.rollout.max_running_samples,
        tp_size=config.rollout.tp_size,
        load_weights=load_weights,
        options=backend_options(backend, config.rollout.options, registry),
        engine_kwargs=dict(config.rollout.engine_kwargs),
    )


def train_role(
    config: RunConfig, registry: Registry, cluster: Cluster, role: str, model: ModelSpec, optim: OptimSpec | None
) -> RoleGroup:
    """Starts the train backend under a role; `optim` None makes a frozen one."""
    spec = registry.backend(BackendKind.TRAIN, config.train.backend)
    train = train_spec(config, registry, spec, model, optim)
    return _role(registry, cluster, role, spec, TRAIN_HOST, train, config.train.options)


def rollout_role(config: RunConfig, registry: Registry, cluster: Cluster, *, load_weights: bool = False) -> RoleGroup:
    """Starts the rollout backend; unless it loads them itself, its weights arrive by the first sync."""
    spec = registry.backend(BackendKind.ROLLOUT, config.rollout.backend)
    rollout = rollout_spec(config, registry, spec, load_weights=load_weights)
    options = config.rollout.options
    return _role(registry, cluster, "rollout", spec, ROLLOUT_HOST, rollout, options, config.rollout.tp_size)


def _role(
    registry: Registry,
    cluster: Cluster,
    role: str,
    spec: BackendSpec,
    host: str,
    engine_spec: TrainSpec | RolloutSpec,
    options: Mapping[str, Any],
    devices_per_rank: int = 1,
) -> RoleGroup:
    """Builds the hosts of a role, with the interpreter of its backend's own environment where it has one."""
    isolation = registry.isolation(spec)
    try:
        group = cluster.create_group(
            role,
            host=host,
            # Options were built here to be checked. The worker makes them anew: this process may only know their copy.
            args=(spec.engine, replace(engine_spec, options=None), EngineOptions(spec=spec, raw=dict(options))),
            py_executable=isolation.python if isolation else None,
            devices_per_rank=devices_per_rank,
        )
    except ConfigError as error:
        if isolation is not None:
            error.add_note(f"{spec.kind} backend {spec.name!r} lives in {isolation.environment}")
        raise
    return RoleGroup(group=group, spec=spec)


def load_engine(actor: RoleGroup, checkpoint: Path) -> None:
    """Gives the engine its part of a checkpoint.

    Raises:
        CheckpointError: the engine refuses it; names the whole checkpoints beside it.
    """
    try:
        actor.run("load_checkpoint", str(checkpoint / "actor"))
    except CheckpointError as error:
        raise CheckpointError(f"{error}{older_whole(checkpoint)}") from error


def sharding_manager(config: RunConfig, registry: Registry, train: RoleGroup, rollout: RoleGroup) -> ShardingManager:
    """The registered manager for this pair of backends, else the generic one."""
    chosen = registry.sharding_manager(train.backend, rollout.backend, config.sharding.manager)
    manager: ShardingManager = chosen(
        train,
        rollout,
        timeout_s=config.trainer.timeout_s,
        bucket_bytes=config.sharding.bucket_mb << 20,
        transports=allowed_transports(config.sharding.transport),
    )
    return manager
