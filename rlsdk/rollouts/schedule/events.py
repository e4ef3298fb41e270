"""Events into a schedule, and commands out of it.

Steps are counted from 1; the weights of step 0 are those that the run starts from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Snapshot:
    """Copy the weights of this step, to be published later while the next step trains."""

    step: int


@dataclass(frozen=True)
class Publish:
    """Sync the weights of this step to every replica, then answer `Published`."""

    step: int


@dataclass(frozen=True)
class Start:
    """Start these groups, by ordinal; they are trained in `step` at the latest."""

    step: int
    groups: Sequence[int]
    weights: int | None = None
    """Step whose weights sample them, whatever else is served; None: those that are served."""


@dataclass(frozen=True)
class Train:
    """Train on these groups, in this order, then answer `Updated`."""

    step: int
    groups: tuple[int, ...]


Command = Snapshot | Publish | Start | Train


@dataclass(frozen=True)
class Published:
    step: int


@dataclass(frozen=True)
class Sampled:
    """The last token of a group was drawn, but its grades are missing. It precedes `Finished`, which implies it if a
    driver omits this event."""

    group: int


@dataclass(frozen=True)
class Finished:
    """A group was sampled and graded."""

    group: int
    accepted: bool = True
    """False: it has no training signal; another group is started in its place, up to `max_groups_per_step`."""


@dataclass(frozen=True)
class Updated:
    step: int


Event = Published | Sampled | Finished | Updated
