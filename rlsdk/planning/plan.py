"""Resolves everything that a run would resolve, without taking a device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rlsdk.cluster import PlacementSpec, processors_notice
from rlsdk.config import Role, RunConfig, StepPasses, backend_options
from rlsdk.config.checks.declared import own_functions
from rlsdk.config.sections.algorithm import POLICY_GRADIENT
from rlsdk.config.sections.role_kinds import ACTOR, ROLLOUT, TEACHER, base_role
from rlsdk.interfaces import BackendSpec, ConfigError, Forecast, LayoutError, RankContext, WeightLayout, Workload
from rlsdk.interfaces.spelling import as_given
from rlsdk.planning.batches import batch_sizes, running_rows, update_rows
from rlsdk.planning.calibration import Calibration, Prediction, Work, planned_passes, predict
from rlsdk.planning.contents import PlanContents, PlannedRole
from rlsdk.planning.hardware import Hardware, nodes_of, this_machine
from rlsdk.planning.memory import CountedRole, by_phase, on_host, teacher_head_bytes
from rlsdk.planning.places import Places, place
from rlsdk.planning.reshard import ReshardSummary, layouts_of, summarize
from rlsdk.planning.text import html_of, text_of
from rlsdk.registry import Registry
from rlsdk.system.processors import usable_processors
from rlsdk.trainer.learner.watch import setting_notices
from rlsdk.trainer.roles.device_turns import shared_pools
from rlsdk.trainer.roles.placement import resolve_device
from rlsdk.trainer.runs.prepare import PreparedRun

Layouts = tuple[Sequence[WeightLayout], Sequence[WeightLayout]]
"""Layouts of the training ranks, and of the targets of weights."""


@dataclass(frozen=True, kw_only=True)
class RunPlan(PlanContents):
    """The plan of a run. `print` and notebooks show the tables of `rlsdk plan`."""

    def __repr__(self) -> str:
        return text_of(self)

    def _repr_html_(self) -> str:
        return html_of(self)


@dataclass(frozen=True, kw_only=True)
class _Roles:
    """The planned roles of a run, by name."""

    table: Mapping[str, Role]
    places: Places
    forecasts: Mapping[str, Forecast | None]
    backends: Mapping[str, BackendSpec]


def make_plan(run: PreparedRun, *, hardware: Hardware | None = None, calibration: Calibration | None = None) -> RunPlan:
    """Computes placement, batch sizes, weight transfer and memory; with a calibration also times.

    Args:
        run: the run.
        hardware: None: this machine.
        calibration: of another run.

    Raises:
        PlacementError: the hardware does not have the devices.
        ConfigError: sizes that do not fit the model or the ranks, or hardware of another kind than the placement's.
    """
    config, registry, placement = run.config, run.registry, run.placement
    is_here, hardware = hardware is None, hardware or this_machine(run.device)
    kind = "cuda" if any(pool.device == "cuda" for pool in placement.pools) else "cpu"
    if kind != hardware.device:
        raise ConfigError(
            f"{as_given('hardware', hardware.name)} is {hardware.device!r}, but placement.device puts the run "
            f"on {kind!r}; give hardware of that kind, or leave placement.device at 'auto'"
        )
    num_nodes, per_node = nodes_of(hardware, placement)
    found = _roles(run, (num_nodes, per_node), hardware)
    unknown = [
        f"role {name!r}: {spec.kind} backend {spec.name!r} has no forecast, so its memory"
        f"{' and the reshard are' if name in (ACTOR, ROLLOUT) else ' is'} unknown"
        for name, spec in found.backends.items()
        if found.forecasts[name] is None
    ]
    reshard = None
    try:
        reshard = _reshard(config, found)
    except LayoutError as error:
        unknown.append(f"the reshard cannot be planned: {error}")
    turns = shared_pools(placement)
    counted = {
        name: CountedRole.of(role, found.forecasts[name], found.backends[name].capabilities, shared=role.pool in turns)
        for name, role in found.table.items()
    }
    if config.learns_exactly:
        teachers = [role for name, role in found.table.items() if base_role(name) == TEACHER]
        heads = sum(teacher_head_bytes(teacher.model) for teacher in teachers)
        counted[ACTOR] = replace(counted[ACTOR], teacher_bytes=heads)
    devices = found.places.devices
    blocks = reshard.sending_bytes if reshard is not None else 0
    memory = by_phase(devices, counted, kind=hardware.device, block_bytes=blocks, source=ACTOR)
    if any(part.num_bytes is None for phase in memory for part in phase.parts):
        unknown.append("memory: parts marked with ? could not be worked out, and are not in the sums")
    host: dict[int, int] = {}
    for at in devices if hardware.device == "cuda" else ():
        host[at.node] = host.get(at.node, 0) + on_host(at, counted) + blocks * (ACTOR in at.ranks)
    actor = found.forecasts[ACTOR]
    batches = batch_sizes(
        config,
        found.table[ACTOR],
        num_replicas=len(found.places.contexts[ROLLOUT]),
        dp_size=None if actor is None else actor.dp_size,
    )
    prediction = None
    if calibration is not None:
        prediction = _predicted(config, run.device, found, reshard, calibration, registry, unknown)
    return RunPlan(
        hardware=hardware,
        num_nodes=num_nodes,
        devices_per_node=per_node,
        roles=tuple(_planned(role, found) for role in found.table.values()),
        places=found.places,
        batches=tuple(batches),
        reshard=reshard,
        adapter_bytes=_adapter_bytes(found),
        memory=tuple(memory),
        host_bytes=max(host.values(), default=0),
        prediction=prediction,
        unknown=tuple(unknown),
        notices=(*setting_notices(config, registry), *(_busy(config, placement) if is_here else ())),
    )


def _busy(config: RunConfig, placement: PlacementSpec) -> Iterator[str]:
    """Notice on this machine's processors, if the run starts its own cluster on it."""
    if config.placement.ray_address is None and (notice := processors_notice(placement, usable_processors())):
        yield notice


def _roles(run: PreparedRun, nodes: tuple[int, int], hardware: Hardware) -> _Roles:
    """Places every rank and forecasts its memory."""
    config, registry, table = run.config, run.registry, run.table
    places = place(
        run.placement,
        num_nodes=nodes[0],
        devices_per_node=nodes[1],
        devices_per_rank={role.name: role.devices_per_rank for role in table},
        seed=config.trainer.seed,
        timeout_s=config.deadlines.start_s,
    )
    workload = Workload(
        row_tokens=config.max_model_tokens,
        update_rows=update_rows(config),
        running_rows=running_rows(config, len(places.contexts[ROLLOUT])),
        device_bytes=hardware.device_bytes,
    )
    backends = {role.name: registry.backend(role.kind, role.backend) for role in table}
    return _Roles(
        table={role.name: role for role in table},
        places=places,
        forecasts={
            role.name: _forecast(registry, backends[role.name], places.contexts[role.name], role, workload)
            for role in table
        },
        backends=backends,
    )


def _planned(role: Role, found: _Roles) -> PlannedRole:
    memory = found.forecasts[role.name]
    return PlannedRole(
        name=role.name,
        backend=role.backend,
        model=role.model.path,
        head=role.model.head.value,
        dtype=role.model.dtype,
        lr=None if role.optim is None else role.optim.lr,
        pool=role.pool,
        ranks=len(found.places.contexts[role.name]),
        devices_per_rank=role.devices_per_rank,
        weights_bytes=None if memory is None else _largest(m.weights_bytes for m in memory.memory),
        optimizer_bytes=None if memory is None else _largest(m.optimizer_bytes for m in memory.memory),
    )


def _largest(sizes: Iterable[int | None]) -> int | None:
    ordered = list(sizes)
    return None if None in ordered else max((size for size in ordered if size is not None), default=0)


def _forecast(
    registry: Registry,
    backend: BackendSpec,
    contexts: tuple[RankContext, ...],
    role: Role,
    workload: Workload,
) -> Forecast | None:
    function = registry.load_forecast(backend)
    if function is None:
        return None
    spec = replace(role.spec, options=backend_options(backend, role.options, registry))
    return function(contexts, spec, workload)


def weight_layouts(config: RunConfig, registry: Registry, hardware: Hardware) -> Layouts | None:
    """Layouts of every training rank, and of every target in the rollout engines; None: unknown.

    Raises:
        PlacementError, ConfigError: as `make_plan`.
    """
    run = PreparedRun.of(config, registry, hardware.device)
    return _layouts(_roles(run, nodes_of(hardware, run.placement), hardware))


def _layouts(roles: _Roles) -> Layouts | None:
    actor, rollout = roles.forecasts[ACTOR], roles.forecasts[ROLLOUT]
    if actor is None or rollout is None:
        return None
    processes, contexts = roles.places.processes, roles.places.contexts
    return (
        layouts_of(actor, processes[ACTOR], contexts[ACTOR]),
        layouts_of(rollout, processes[ROLLOUT], contexts[ROLLOUT]),
    )


def _reshard(config: RunConfig, roles: _Roles) -> ReshardSummary | None:
    layouts = _layouts(roles)
    if layouts is None:
        return None
    sharding = config.sharding
    return summarize(*layouts, bucket_bytes=sharding.bucket_mb << 20, transport=sharding.transport)


def _adapter_bytes(roles: _Roles) -> int:
    """Bytes of an adapter that is sent alone, to all replicas."""
    forecast = roles.forecasts[ROLLOUT]
    return 0 if forecast is None else forecast.adapter_bytes * len(roles.places.contexts[ROLLOUT])


def _work(config: RunConfig, passes: StepPasses, device: str, roles: _Roles, reshard: ReshardSummary) -> Work:
    return Work(
        num_parameters=reshard.num_parameters,
        actor_devices=len(roles.places.contexts[ACTOR]),
        rollout_devices=len(roles.places.contexts[ROLLOUT]) * config.rollout.num_devices,
        sync_bytes=(_adapter_bytes(roles) or reshard.num_bytes) // max(len(roles.places.contexts[ROLLOUT]), 1),
        samples=config.trainer.samples_per_step,
        forward_passes=len(passes.passes),
        epochs=config.trainer.epochs_per_step * sum(role.is_trained for role in roles.table.values()),
        longest=config.max_model_tokens,
        longest_response=config.rollout.max_response_tokens,
        backends=(config.train.backend, config.rollout.backend, device),
    )


def _predicted(
    config: RunConfig,
    device: str,
    found: _Roles,
    reshard: ReshardSummary | None,
    calibration: Calibration,
    registry: Registry,
    unknown: list[str],
) -> Prediction | None:
    """Plans the calibrating run like this one, to relate its seconds to its work."""
    then = calibration.config
    ran = PreparedRun.of(then, registry, resolve_device(then.placement))
    hardware = this_machine(ran.device)
    measured_roles = _roles(ran, nodes_of(hardware, ran.placement), hardware)
    measured = _reshard(then, measured_roles)
    if reshard is None or measured is None:
        unknown.append("times: without the reshard the sizes of models are unknown")
        return None
    if config.algorithm.name != POLICY_GRADIENT:
        unknown.append(
            f"passes of algorithm.name {config.algorithm.name!r}: taken for those that its fields would need with "
            f"{POLICY_GRADIENT!r}"
        )
    passes = planned_passes(config, registry)
    # The calibrating run may be a stranger's: functions of its own are not imported.
    same = own_functions(config) == own_functions(then)
    before = planned_passes(then, registry, reads=None if same else ())
    return predict(
        _work(config, passes, device, found, reshard),
        calibration,
        _work(then, before, ran.device, measured_roles, measured),
    )
