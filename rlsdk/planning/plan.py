"""Resolves everything that a run would resolve, without taking a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlsdk.config import RunConfig
from rlsdk.interfaces import (
    BackendKind,
    BackendSpec,
    ConfigError,
    Forecast,
    LayoutError,
    RankContext,
    RolloutSpec,
    TrainSpec,
    Workload,
)
from rlsdk.planning.batches import BatchSize, batch_sizes, running_rows, update_rows
from rlsdk.planning.calibration import Calibration, Prediction, Work, forward_passes, predict
from rlsdk.planning.hardware import Hardware, nodes_of, this_machine
from rlsdk.planning.memory import PhaseMemory, Role, by_phase, on_host
from rlsdk.planning.places import Places, place
from rlsdk.planning.reshard import ReshardSummary, layouts_of, summarize
from rlsdk.registry import Registry
from rlsdk.trainer.session import (
    model_spec,
    optim_spec,
    placement_of,
    resolve_device,
    roles_of,
    rollout_spec,
    train_spec,
)

TIGHT = 0.9
"""Share of a device's memory above which fragmentation and what is not counted may end a run."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What a run would be."""

    hardware: Hardware
    num_nodes: int
    devices_per_node: int
    backends: Mapping[str, str]
    places: Places
    batches: tuple[BatchSize, ...]
    reshard: ReshardSummary | None
    """None: a backend cannot say what it holds."""
    memory: tuple[PhaseMemory, ...]
    host_bytes: int
    """Main memory of the fullest node that its GPU processes keep weights and blocks in; 0 with CPU ranks."""
    prediction: Prediction | None
    unknown: tuple[str, ...]
    """What could not be worked out, and why."""

    @property
    def peak(self) -> PhaseMemory:
        """The fullest moment."""
        return max(self.memory, key=lambda phase: phase.known_bytes)

    @property
    def fits(self) -> bool | None:
        """None: not known."""
        if self.hardware.device_bytes is None:
            return None
        if self.peak.known_bytes > self.hardware.device_bytes:
            return False
        return True if all(phase.is_known for phase in self.memory) else None

    @property
    def is_tight(self) -> bool:
        size = self.hardware.device_bytes
        return size is not None and self.peak.known_bytes > TIGHT * size


@dataclass(frozen=True, kw_only=True)
class _Roles:
    """The roles of a run, worked out."""

    places: Places
    forecasts: Mapping[str, Forecast | None]
    specs: Mapping[str, BackendSpec]
    train: TrainSpec


def make_plan(
    config: RunConfig,
    registry: Registry,
    *,
    device: str,
    hardware: Hardware | None = None,
    calibration: Calibration | None = None,
) -> RunPlan:
    """Works out placement, batches, reshard and memory; times where a calibration is given.

    Args:
        config: a run that was checked.
        registry: what is installed.
        device: `cpu` or `cuda`, where the placement leaves it open.
        hardware: None: this machine.
        calibration: of another run.

    Raises:
        PlacementError: the hardware does not have the devices.
        ConfigError: sizes that do not fit the model or the ranks, or hardware of another kind than the placement's.
    """
    device = device if config.placement.device == "auto" else config.placement.device
    hardware = hardware or this_machine(device)
    placement = placement_of(config, roles_of(config), device)
    kind = "cuda" if any(pool.device == "cuda" for pool in placement.pools) else "cpu"
    if kind != hardware.device:
        raise ConfigError(
            f"--hardware {hardware.name!r} is {hardware.device!r}, but placement.device puts the run on {kind!r}; give "
            "hardware of that kind, or leave placement.device at 'auto'"
        )
    num_nodes, per_node = nodes_of(hardware, placement)
    roles = _roles(config, registry, device, hardware)
    unknown = [
        f"role {name!r}: {spec.kind} backend {spec.name!r} has no forecast, so its memory and the reshard are unknown"
        for name, spec in roles.specs.items()
        if roles.forecasts[name] is None
    ]
    reshard = None
    try:
        reshard = _reshard(config, roles)
    except LayoutError as error:
        unknown.append(f"the reshard cannot be planned: {error}")
    shared = placement.roles["actor"] == placement.roles["rollout"] and hardware.device == "cuda"
    counted = {
        name: Role.of(name, forecast, roles.specs[name].capabilities, shared=shared)
        for name, forecast in roles.forecasts.items()
    }
    devices = roles.places.devices
    blocks = reshard.sending_bytes if reshard is not None else 0
    memory = by_phase(devices, counted, kind=hardware.device, block_bytes=blocks)
    if any(part.num_bytes is None for phase in memory for part in phase.parts):
        unknown.append("memory: parts marked with ? could not be worked out, and are not in the sums")
    host: dict[int, int] = {}
    for at in devices if hardware.device == "cuda" else ():
        host[at.node] = host.get(at.node, 0) + on_host(at, counted) + blocks * ("actor" in at.ranks)
    actor = roles.forecasts["actor"]
    batches = batch_sizes(
        config,
        roles.train,
        num_replicas=len(roles.places.contexts["rollout"]),
        dp_size=None if actor is None else actor.dp_size,
    )
    prediction = None
    if calibration is not None:
        prediction = _predicted(config, device, roles, reshard, calibration, registry, unknown)
    return RunPlan(
        hardware=hardware,
        num_nodes=num_nodes,
        devices_per_node=per_node,
        backends={name: spec.name for name, spec in roles.specs.items()},
        places=roles.places,
        batches=tuple(batches),
        reshard=reshard,
        memory=tuple(memory),
        host_bytes=max(host.values(), default=0),
        prediction=prediction,
        unknown=tuple(unknown),
    )


def _roles(config: RunConfig, registry: Registry, device: str, hardware: Hardware) -> _Roles:
    placement = placement_of(config, roles_of(config), device)
    num_nodes, per_node = nodes_of(hardware, placement)
    places = place(
        placement,
        num_nodes=num_nodes,
        devices_per_node=per_node,
        tp_size=config.rollout.tp_size,
        seed=config.trainer.seed,
        timeout_s=config.deadlines.start_s,
    )
    train_backend = registry.backend(BackendKind.TRAIN, config.train.backend)
    rollout_backend = registry.backend(BackendKind.ROLLOUT, config.rollout.backend)
    optim = optim_spec(config.train.optim, config.trainer.optimizer_steps)
    train = train_spec(config, registry, train_backend, model_spec(config), optim)
    frozen = train_spec(config, registry, train_backend, model_spec(config), None)
    rollout = rollout_spec(config, registry, rollout_backend)
    workload = Workload(
        row_tokens=config.max_model_tokens,
        update_rows=update_rows(config),
        running_rows=running_rows(config, len(places.contexts["rollout"])),
        device_bytes=hardware.device_bytes,
    )
    of_role: dict[str, tuple[BackendSpec, TrainSpec | RolloutSpec]] = {
        "actor": (train_backend, train),
        "ref": (train_backend, frozen),
        "rollout": (rollout_backend, rollout),
    }
    chosen = {role: of_role[role] for role in placement.roles}
    return _Roles(
        places=places,
        forecasts={
            role: _forecast(registry, backend, places.contexts[role], spec, workload)
            for role, (backend, spec) in chosen.items()
        },
        specs={role: backend for role, (backend, _) in chosen.items()},
        train=train,
    )


def _forecast(
    registry: Registry,
    backend: BackendSpec,
    contexts: tuple[RankContext, ...],
    spec: TrainSpec | RolloutSpec,
    workload: Workload,
) -> Forecast | None:
    function = registry.load_forecast(backend)
    return None if function is None else function(contexts, spec, workload)


def _reshard(config: RunConfig, roles: _Roles) -> ReshardSummary | None:
    actor, rollout = roles.forecasts["actor"], roles.forecasts["rollout"]
    if actor is None or rollout is None:
        return None
    processes, contexts = roles.places.processes, roles.places.contexts
    source = layouts_of(actor, processes["actor"], contexts["actor"])
    target = layouts_of(rollout, processes["rollout"], contexts["rollout"])
    sharding = config.sharding
    return summarize(source, target, bucket_bytes=sharding.bucket_mb << 20, transport=sharding.transport)


def _work(config: RunConfig, device: str, roles: _Roles, reshard: ReshardSummary) -> Work:
    return Work(
        num_parameters=reshard.num_parameters,
        actor_devices=len(roles.places.contexts["actor"]),
        rollout_devices=len(roles.places.contexts["rollout"]) * config.rollout.tp_size,
        sync_bytes=reshard.num_bytes // max(reshard.targets, 1),
        samples=config.trainer.samples_per_step,
        forward_passes=forward_passes(config),
        epochs=config.trainer.epochs_per_step,
        longest=config.max_model_tokens,
        longest_response=config.rollout.max_response_tokens,
        backends=(config.train.backend, config.rollout.backend, device),
    )


def _predicted(
    config: RunConfig,
    device: str,
    roles: _Roles,
    reshard: ReshardSummary | None,
    calibration: Calibration,
    registry: Registry,
    unknown: list[str],
) -> Prediction | None:
    """Works the calibrating run out like this one, to know what its seconds were spent on."""
    then = calibration.config
    there = resolve_device(then)
    measured_roles = _roles(then, registry, there, this_machine(there))
    measured = _reshard(then, measured_roles)
    if reshard is None or measured is None:
        unknown.append("times: without the reshard the sizes of models are unknown")
        return None
    return predict(_work(config, device, roles, reshard), calibration, _work(then, there, measured_roles, measured))
