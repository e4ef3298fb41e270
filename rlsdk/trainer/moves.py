"""Plans the offload and onload calls that bring a pool's devices to the required state. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WEIGHTS, CACHE = "weights", "kv_cache"
STEPPING = ("optimizer", "gradients")
"""What only an update needs."""
NOTHING: frozenset[str] = frozenset()
KEEP, DROP = 1, 2
"""Levels of sleep: weights stay on the host; or the next sync brings all of them, so that none are kept."""


@dataclass(frozen=True, kw_only=True)
class Seat:
    """One role on the devices of a pool."""

    role: str
    serves: bool = False
    """A rollout engine: it sleeps and wakes. The others are offloaded and come back."""
    keeps: bool = False
    """A rollout engine with its own weights, which no sync brings back."""
    trained: bool = False
    moves: bool = True
    """It can give its memory up. What cannot is always on the device."""

    @property
    def parts(self) -> tuple[str, ...]:
        """What it has on a device, in the order in which it comes."""
        return (WEIGHTS, CACHE) if self.serves else (WEIGHTS, *STEPPING) if self.trained else (WEIGHTS,)


@dataclass(frozen=True, kw_only=True)
class Move:
    """One call to every rank of a role."""

    role: str
    method: str
    argument: int | tuple[str, ...]
    after: frozenset[str]
    """What of the role is on the device then."""

    @property
    def stage(self) -> str:
        """As reports name it: `offload actor optimizer`, `sleep rollout`."""
        part = "" if isinstance(self.argument, int) else f" {self.argument[0]}"
        return f"{self.method} {self.role}{part}"


def moves(
    seats: Sequence[Seat], here: Mapping[str, frozenset[str]], wanted: Mapping[str, frozenset[str]]
) -> list[Move]:
    """The calls that bring the roles of one pool from what is on its devices to what is needed there.

    What leaves goes before anything comes, so at no time is there more than before or more than after. Of one role
    optimizer and gradients leave before the weights, and come after them; weights come before the key-value cache.

    Args:
        seats: every role of the pool.
        here: parts on the device, by role.
        wanted: the same, afterwards; a role that is not named has nothing there.
    """
    leaving, coming = [], []
    for seat in seats:
        if seat.moves:
            target = wanted.get(seat.role, NOTHING)
            away, back = (_serving if seat.serves else _training)(seat, here[seat.role], target)
            leaving += away
            coming += back
    return [*leaving, *coming]


def _serving(seat: Seat, here: frozenset[str], target: frozenset[str]) -> tuple[list[Move], list[Move]]:
    """An engine falls asleep as a whole, and wakes in parts."""
    away: list[Move] = []
    if here - target:
        away.append(Move(role=seat.role, method="sleep", argument=KEEP if seat.keeps else DROP, after=NOTHING))
        here = NOTHING
    back = []
    for part in seat.parts:
        if part in target - here:
            here |= {part}
            back.append(Move(role=seat.role, method="wake", argument=(part,), after=here))
    return away, back


def _training(seat: Seat, here: frozenset[str], target: frozenset[str]) -> tuple[list[Move], list[Move]]:
    away, back = [], []
    for parts in (STEPPING, (WEIGHTS,)):
        if going := tuple(part for part in parts if part in here - target):
            here -= frozenset(going)
            away.append(Move(role=seat.role, method="offload", argument=going, after=here))
    for parts in ((WEIGHTS,), STEPPING):
        if arriving := tuple(part for part in parts if part in target - here):
            here |= frozenset(arriving)
            back.append(Move(role=seat.role, method="onload", argument=arriving, after=here))
    return away, back
