"""Plans the offload and onload calls that bring a pool's devices to the required state. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WEIGHTS, CACHE = "weights", "kv_cache"
STEPPING = ("optimizer", "gradients")
"""Parts that only an update needs."""
NOTHING: frozenset[str] = frozenset()
KEEP, DROP = 1, 2
"""Sleep levels: KEEP offloads the weights to the host; DROP discards them, because the next sync brings all of them."""


@dataclass(frozen=True, kw_only=True)
class RoleMemory:
    """A role on the devices of a pool."""

    role: str
    is_rollout: bool = False
    """Whether it is a rollout engine, which sleeps and wakes; other roles are offloaded and onloaded."""
    keeps_weights: bool = False
    """Whether it is a rollout engine with weights that no sync restores."""
    is_sampling: bool = False
    """Whether it works while the policy samples: its rollout engine, and judges; a teacher's does afterwards."""
    is_trained: bool = False
    can_offload: bool = True
    """Whether it can free its device memory; otherwise it is always on the device."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Its parts on a device, in onload order."""
        return (WEIGHTS, CACHE) if self.is_rollout else (WEIGHTS, *STEPPING) if self.is_trained else (WEIGHTS,)


@dataclass(frozen=True, kw_only=True)
class Move:
    """One call to every rank of a role."""

    role: str
    method: str
    argument: int | tuple[str, ...]
    after: frozenset[str]
    """Parts of the role on the device after the call."""

    @property
    def stage(self) -> str:
        """Name in reports: `offload actor optimizer`, `sleep rollout`."""
        part = "" if isinstance(self.argument, int) else f" {self.argument[0]}"
        return f"{self.method} {self.role}{part}"


def moves(
    memories: Sequence[RoleMemory], here: Mapping[str, frozenset[str]], wanted: Mapping[str, frozenset[str]]
) -> list[Move]:
    """Plans the calls that change a pool's devices from the current parts to the wanted ones.

    Offloads precede onloads, so memory use never exceeds the larger of before and after. Within a role, optimizer and
    gradients leave before the weights and return after them; weights return before the KV cache.

    Args:
        memories: every role of the pool.
        here: parts on the device now, by role.
        wanted: parts on the device afterwards; a role that is not named has none.
    """
    leaving, coming = [], []
    for memory in memories:
        if memory.can_offload:
            target = wanted.get(memory.role, NOTHING)
            away, back = (_serving if memory.is_rollout else _training)(memory, here[memory.role], target)
            leaving += away
            coming += back
    return [*leaving, *coming]


def _serving(memory: RoleMemory, here: frozenset[str], target: frozenset[str]) -> tuple[list[Move], list[Move]]:
    """Plans sleep and wake calls: an engine sleeps as a whole, and wakes in parts."""
    away: list[Move] = []
    if here - target:
        away.append(
            Move(role=memory.role, method="sleep", argument=KEEP if memory.keeps_weights else DROP, after=NOTHING)
        )
        here = NOTHING
    back = []
    for part in memory.parts:
        if part in target - here:
            here |= {part}
            back.append(Move(role=memory.role, method="wake", argument=(part,), after=here))
    return away, back


def _training(memory: RoleMemory, here: frozenset[str], target: frozenset[str]) -> tuple[list[Move], list[Move]]:
    away, back = [], []
    for parts in (STEPPING, (WEIGHTS,)):
        if going := tuple(part for part in parts if part in here - target):
            here -= frozenset(going)
            away.append(Move(role=memory.role, method="offload", argument=going, after=here))
    for parts in ((WEIGHTS,), STEPPING):
        if arriving := tuple(part for part in parts if part in target - here):
            here |= frozenset(arriving)
            back.append(Move(role=memory.role, method="onload", argument=arriving, after=here))
    return away, back
