"""Memory by phase and role, on the devices that need most."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlsdk.interfaces import Capability, Forecast, RankMemory
from rlsdk.planning.places import PlannedDevice

PHASES = ("sync", "rollout", "log_probs", "update")
MIB = 1 << 20
RUNTIME_BYTES: Mapping[str, int] = {"cpu": 350 * MIB, "cuda": 1536 * MIB}
"""Of a worker, besides all tensors, by what it runs on. cpu: interpreter, torch, transformers and Ray in main memory,
measured (docs/benchmarks.md); cuda: driver context, kernels and communication buffers on the device, a common figure,
not measured."""
CONTROLLER_BYTES = 700 * MIB
"""Of the controller with grading processes and Ray's own, on the first node; measured (docs/benchmarks.md)."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one role takes for one purpose. None: unknown."""

    role: str
    what: str
    num_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class PhaseMemory:
    """One phase, on the device (with CPU ranks: on the node) that needs most in it."""

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
class Role:
    """What the memory of a role is counted from."""

    name: str
    memory: tuple[RankMemory, ...] | None
    """Per rank; None: its backend cannot say."""
    takes_turns: bool = False
    """Its memory is given up while others work: it offloads, or sleeps."""

    @classmethod
    def of(cls, name: str, forecast: Forecast | None, capabilities: frozenset[Capability], *, shared: bool) -> Role:
        """`shared`: actor and rollout stand on the same accelerators, and so take turns where they can."""
        able = {"actor": Capability.OFFLOAD, "rollout": Capability.SLEEP}.get(name)
        return cls(
            name=name,
            memory=None if forecast is None else forecast.memory,
            takes_turns=shared and able is not None and able in capabilities,
        )


def on_device(device: PlannedDevice, phase: str, roles: Mapping[str, Role]) -> list[Part]:
    """Everything that one device holds in a phase, besides blocks and what every worker takes."""
    parts = []
    for name, rank in device.ranks.items():
        role = roles[name]
        if role.memory is None:
            parts.append(Part(role=name, what="everything", num_bytes=None))
        else:
            held = role.memory[rank]
            found = _rollout(role, held, phase) if name == "rollout" else _train(role, held, phase)
            parts += [Part(role=name, what=what, num_bytes=num_bytes) for what, num_bytes in found if num_bytes != 0]
    return parts


def _train(role: Role, held: RankMemory, phase: str) -> Iterator[tuple[str, int | None]]:
    away = role.takes_turns and phase == "rollout"
    if not held.on_host and not away:
        yield "weights", held.weights_bytes
        if not (role.takes_turns and phase == "sync"):
            yield "optimizer", held.optimizer_bytes
        if phase == "update" or (held.gradients_stay and not (role.takes_turns and phase == "sync")):
            yield "gradients", held.gradients_bytes
    if phase == "update":
        yield "activations", held.backward_bytes
    if phase == "log_probs":
        yield "activations", held.forward_bytes


def _rollout(role: Role, held: RankMemory, phase: str) -> Iterator[tuple[str, int | None]]:
    away = role.takes_turns and phase in ("log_probs", "update")
    if not away:
        yield "weights", held.weights_bytes
    if phase == "rollout" or (held.cache_stays and not role.takes_turns):
        yield "keys, values", held.cache_bytes
    if phase == "rollout":
        yield "decoding", held.forward_bytes


def of_engines(device: PlannedDevice, roles: Mapping[str, Role]) -> Iterator[tuple[str, int]]:
    """Role, and what its engine's modules and own processes take of main memory."""
    for name, rank in device.ranks.items():
        if (memory := roles[name].memory) is not None:
            yield name, memory[rank].process_bytes


def on_host(device: PlannedDevice, roles: Mapping[str, Role]) -> int:
    """Bytes that a GPU's process keeps in main memory at most: what is offloaded, or lives there."""
    total = 0
    for name, rank in device.ranks.items():
        memory = roles[name].memory
        if memory is not None and name != "rollout" and (roles[name].takes_turns or memory[rank].on_host):
            held = memory[rank]
            total += (held.weights_bytes or 0) + (held.optimizer_bytes or 0)
    return total


def by_phase(
    devices: Sequence[PlannedDevice], roles: Mapping[str, Role], *, kind: str, block_bytes: int
) -> list[PhaseMemory]:
    """Of each phase the fullest device of each pool; where devices are processes on a CPU, the fullest node.

    Args:
        devices: all of them.
        roles: by name.
        kind: `cpu` or `cuda`.
        block_bytes: what a process that sends weights keeps for that; on GPUs it lies in main memory.
    """
    phases = [phase for phase in PHASES if phase != "log_probs" or len(roles) > 0]
    if kind == "cuda":
        pools = dict.fromkeys(device.pool for device in devices)
        return [
            PhaseMemory(place=f"pool {pool}", phase=phase, parts=tuple(_fullest(devices, pool, phase, roles)))
            for pool in pools
            for phase in phases
            if _busy(devices, pool, phase)
        ]
    found = []
    for phase in phases:
        nodes: dict[int, list[Part]] = {}
        for device in devices:
            parts = nodes.setdefault(device.node, [])
            parts += on_device(device, phase, roles)
            parts.append(Part(role="", what="processes", num_bytes=RUNTIME_BYTES["cpu"]))
            parts += [Part(role=name, what="processes", num_bytes=size) for name, size in of_engines(device, roles)]
            if "actor" in device.ranks:
                parts.append(Part(role="actor", what="buckets", num_bytes=block_bytes))
        for node, parts in nodes.items():
            if node == 0:
                parts.append(Part(role="", what="processes", num_bytes=CONTROLLER_BYTES))
        node = max(nodes, key=lambda node: sum(part.num_bytes or 0 for part in nodes[node]))
        found.append(PhaseMemory(place=f"node {node}", phase=phase, parts=tuple(_added_up(nodes[node]))))
    return found


def _busy(devices: Sequence[PlannedDevice], pool: str, phase: str) -> bool:
    """Whether a pool does anything in a phase."""
    roles = {role for device in devices if device.pool == pool for role in device.ranks}
    needed = {"sync": {"actor", "rollout"}, "rollout": {"rollout"}, "log_probs": {"actor", "ref"}, "update": {"actor"}}
    return bool(roles & needed[phase])


def _fullest(devices: Sequence[PlannedDevice], pool: str, phase: str, roles: Mapping[str, Role]) -> list[Part]:
    mine = [on_device(device, phase, roles) for device in devices if device.pool == pool]
    parts = max(mine, key=lambda parts: sum(part.num_bytes or 0 for part in parts))
    return [*parts, Part(role="", what="processes", num_bytes=RUNTIME_BYTES["cuda"])]


def _added_up(parts: Sequence[Part]) -> list[Part]:
    """One part for each role and purpose."""
    sums: dict[tuple[str, str], int | None] = {}
    for part in parts:
        key = part.role, part.what
        before = sums.get(key, 0)
        sums[key] = None if before is None or part.num_bytes is None else before + part.num_bytes
    return [
        Part(role=role, what=what, num_bytes=num_bytes) for (role, what), num_bytes in sums.items() if num_bytes != 0
    ]
