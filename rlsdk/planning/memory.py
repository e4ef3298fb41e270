"""Memory by phase and role, on the devices with the largest use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlsdk.config import Role
from rlsdk.interfaces import DTYPE_BYTES, Capability, Forecast, Head, ModelSpec, RankMemory
from rlsdk.kit.model.hf import load_model_config
from rlsdk.planning.places import PlannedDevice
from rlsdk.trainer.roles.memory_moves import CACHE, NOTHING, WEIGHTS, RoleMemory

PASSES: Mapping[Head, str] = {Head.LM: "log_probs", Head.VALUE: "values", Head.SCORE: "scores"}
"""Outputs of passes without gradient, by the model's head."""
MIB = 1 << 20
RUNTIME_BYTES: Mapping[str, int] = {"cpu": 350 * MIB, "cuda": 1536 * MIB}
"""Memory of a worker besides tensors, by device. cpu: interpreter, torch, transformers and Ray in main memory, measured
(docs/benchmarks.md); cuda: driver context, kernels and communication buffers on the device, a common figure, not
measured."""
CONTROLLER_BYTES = 700 * MIB
"""Memory of the controller with grading processes and Ray's daemons, on the first node; measured
(docs/benchmarks.md)."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Memory of one role for one purpose. None: unknown."""

    role: str
    what: str
    num_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class PhaseMemory:
    """One phase, on the device (with CPU ranks: the node) with the largest use in it."""

    place: str
    """`pool NAME`, or `node N`."""
    phase: str
    parts: tuple[Part, ...]

    @property
    def known_bytes(self) -> int:
        return sum(part.num_bytes or 0 for part in self.parts)

    @property
    def is_known(self) -> bool:
        return all(part.num_bytes is not None for part in self.parts)


@dataclass(frozen=True, kw_only=True)
class CountedRole:
    """Inputs of the memory count of a role."""

    role_memory: RoleMemory
    memory: tuple[RankMemory, ...] | None
    """Memory per rank; None: its backend cannot forecast it."""
    pool: str = ""
    passes: str = "log_probs"
    """Outputs of its passes without gradient."""
    teacher_bytes: int = 0
    """Heads of teachers on each of its devices, which always stay there."""

    @property
    def name(self) -> str:
        return self.role_memory.role

    @property
    def takes_turns(self) -> bool:
        """Whether it frees its memory while others work: it offloads, or sleeps."""
        return self.role_memory.can_offload

    @classmethod
    def of(
        cls, role: Role, forecast: Forecast | None, capabilities: frozenset[Capability], *, shared: bool
    ) -> CountedRole:
        """`shared`: the roles of its pool take turns if they can."""
        able = Capability.SLEEP if role.is_rollout else Capability.OFFLOAD
        return cls(
            role_memory=RoleMemory(
                role=role.name,
                is_rollout=role.is_rollout,
                keeps_weights=role.keeps_weights,
                is_sampling=role.is_sampling,
                is_trained=role.is_trained,
                can_offload=shared and able in capabilities,
            ),
            memory=None if forecast is None else forecast.memory,
            pool=role.pool,
            passes=PASSES[role.model.head],
        )


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One phase of a step: the roles that work, and the parts that roles which take turns have on the device."""

    name: str
    works: frozenset[str]
    """Roles that work."""
    wanted: Mapping[str, frozenset[str]]
    """Parts by role, as in `DeviceTurns`."""
    steps: bool = False
    """Whether it is an optimizer step."""

    def has(self, role: CountedRole, part: str) -> bool:
        """Whether a part of a role is on the device."""
        return part in (self.wanted.get(role.name, NOTHING) if role.takes_turns else role.role_memory.parts)


def phases_of(roles: Mapping[str, CountedRole], source: str) -> list[Phase]:
    """The phases of a step, in order. `source` is the role whose weights are served."""
    serving = frozenset(name for name, role in roles.items() if role.role_memory.is_sampling)
    weights = frozenset((WEIGHTS,))
    synced = {source, *serving}
    arriving = dict.fromkeys(synced, weights)
    if all(roles[name].pool != roles[source].pool for name in serving):
        arriving[source] = frozenset(roles[source].role_memory.parts)  # No other role needs its memory.
    phases = [
        Phase(name="sync", works=frozenset(synced), wanted=arriving),
        Phase(name="rollout", works=serving, wanted=dict.fromkeys(serving, frozenset((WEIGHTS, CACHE)))),
    ]
    training = [role for name, role in roles.items() if name not in serving]
    # Scores come first, then log-probs and values; the source is updated last.
    training.sort(
        key=lambda role: (role.passes != PASSES[Head.SCORE], role.name == source and role.role_memory.is_trained)
    )
    for role in training:
        name = role.passes if role.name == source else f"{role.name} {role.passes}"
        parts = frozenset(role.role_memory.parts) if role.role_memory.is_rollout else weights
        phases.append(Phase(name=name, works=frozenset((role.name,)), wanted={role.name: parts}))
    for role in training:
        if role.role_memory.is_trained:
            name = "update" if role.name == source else f"{role.name} update"
            whole = {role.name: frozenset(role.role_memory.parts)}
            phases.append(Phase(name=name, works=frozenset((role.name,)), wanted=whole, steps=True))
    return phases


def on_device(device: PlannedDevice, phase: Phase, roles: Mapping[str, CountedRole]) -> list[Part]:
    """Everything that one device holds in a phase, besides transfer blocks and the base memory of workers."""
    parts = []
    for name, rank in device.ranks.items():
        role = roles[name]
        if role.memory is None:
            parts.append(Part(role=name, what="everything", num_bytes=None))
        else:
            held = role.memory[rank]
            found = (_rollout if role.role_memory.is_rollout else _train)(role, held, phase)
            parts += [Part(role=name, what=what, num_bytes=num_bytes) for what, num_bytes in found if num_bytes != 0]
        if role.teacher_bytes:
            parts.append(Part(role=name, what="teacher's head", num_bytes=role.teacher_bytes))
    return parts


def teacher_head_bytes(model: ModelSpec) -> int:
    """Bytes of the output embedding of a teacher, which the workers of the policy hold for the exact divergence."""
    fields = load_model_config(model).get_text_config()
    return int(fields.vocab_size) * int(fields.hidden_size) * DTYPE_BYTES[model.dtype]


def _train(role: CountedRole, held: RankMemory, phase: Phase) -> Iterator[tuple[str, int | None]]:
    works = role.name in phase.works and phase.name != "sync"
    if not held.on_host:
        if phase.has(role, WEIGHTS):
            yield "weights", held.weights_bytes
        if phase.has(role, "optimizer"):
            yield "optimizer", held.optimizer_bytes
        if phase.has(role, "gradients") and ((works and phase.steps) or held.gradients_stay):
            yield "gradients", held.gradients_bytes
    if works:
        yield "activations", held.backward_bytes if phase.steps else held.forward_bytes


def _rollout(role: CountedRole, held: RankMemory, phase: Phase) -> Iterator[tuple[str, int | None]]:
    works = role.name in phase.works and phase.name != "sync"
    if phase.has(role, WEIGHTS):
        yield "weights", held.weights_bytes
    if phase.has(role, CACHE) and (works or held.cache_stays):
        yield "keys, values", held.cache_bytes
    elif not works:
        yield "asleep", held.asleep_bytes
    if works:
        yield "decoding", held.forward_bytes


def of_engines(device: PlannedDevice, roles: Mapping[str, CountedRole]) -> Iterator[tuple[str, int]]:
    """Role -> main memory of its engine's modules and own processes."""
    for name, rank in device.ranks.items():
        if (memory := roles[name].memory) is not None:
            yield name, memory[rank].process_bytes


def on_host(device: PlannedDevice, roles: Mapping[str, CountedRole]) -> int:
    """Most bytes that a GPU's process keeps in main memory: offloaded parts, and parts that always stay there."""
    total = 0
    for name, rank in device.ranks.items():
        role = roles[name]
        memory = role.memory
        stays = role.role_memory.keeps_weights if role.role_memory.is_rollout else True
        if memory is not None and stays and (role.takes_turns or memory[rank].on_host):
            held = memory[rank]
            total += (held.weights_bytes or 0) + (held.optimizer_bytes or 0)
    return total


def by_phase(
    devices: Sequence[PlannedDevice], roles: Mapping[str, CountedRole], *, kind: str, block_bytes: int, source: str
) -> list[PhaseMemory]:
    """For each phase, the fullest device of each pool; if devices are processes on a CPU, the fullest node.

    Args:
        devices: all of them.
        roles: by name.
        kind: `cpu` or `cuda`.
        block_bytes: transfer blocks of a process that sends weights; on GPUs they are in main memory.
        source: the role whose weights are served.
    """
    phases = phases_of(roles, source)
    if kind == "cuda":
        pools = dict.fromkeys(device.pool for device in devices)
        return [
            PhaseMemory(place=f"pool {pool}", phase=phase.name, parts=tuple(_fullest(devices, pool, phase, roles)))
            for pool in pools
            for phase in phases
            if phase.works & {role for device in devices if device.pool == pool for role in device.ranks}
        ]
    rows = []
    for phase in phases:
        nodes: dict[int, list[Part]] = {}
        for device in devices:
            parts = nodes.setdefault(device.node, [])
            parts += on_device(device, phase, roles)
            parts.append(Part(role="", what="processes", num_bytes=RUNTIME_BYTES["cpu"]))
            parts += [Part(role=name, what="processes", num_bytes=size) for name, size in of_engines(device, roles)]
            if source in device.ranks:
                parts.append(Part(role=source, what="buckets", num_bytes=block_bytes))
        for node, parts in nodes.items():
            if node == 0:
                parts.append(Part(role="", what="processes", num_bytes=CONTROLLER_BYTES))
        node = max(nodes, key=lambda node: sum(part.num_bytes or 0 for part in nodes[node]))
        rows.append(PhaseMemory(place=f"node {node}", phase=phase.name, parts=tuple(_added_up(nodes[node]))))
    return rows


def _fullest(devices: Sequence[PlannedDevice], pool: str, phase: Phase, roles: Mapping[str, CountedRole]) -> list[Part]:
    mine = [on_device(device, phase, roles) for device in devices if device.pool == pool]
    parts = max(mine, key=lambda parts: sum(part.num_bytes or 0 for part in parts))
    return [*parts, Part(role="", what="processes", num_bytes=RUNTIME_BYTES["cuda"])]


def _added_up(parts: Sequence[Part]) -> list[Part]:
    """Sums parts by role and purpose."""
    sums: dict[tuple[str, str], int | None] = {}
    for part in parts:
        key = part.role, part.what
        before = sums.get(key, 0)
        sums[key] = None if before is None or part.num_bytes is None else before + part.num_bytes
    return [
        Part(role=role, what=what, num_bytes=num_bytes) for (role, what), num_bytes in sums.items() if num_bytes != 0
    ]
