"""When: the schedule of a run as a pure state machine. Events in, commands out; no clock, no I/O.

One law: *a group for step k may start once the weights of step k - 1 - max_staleness are served, and nothing older is
trained on.* `max_staleness` 0 is the synchronous run. Steps are counted from 1; the weights of step 0 are those that
the run starts from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Publish:
    """Bring the weights of this step to every replica, then answer `Published`."""

    step: int


@dataclass(frozen=True)
class Start:
    """Begin these groups, by ordinal; they are for `step`."""

    step: int
    groups: range


@dataclass(frozen=True)
class Train:
    """Train on these groups, in this order, then answer `Updated`."""

    step: int
    groups: tuple[int, ...]


Command = Publish | Start | Train


@dataclass(frozen=True)
class Published:
    step: int


@dataclass(frozen=True)
class Finished:
    """A group was made and graded."""

    group: int
    accepted: bool = True
    """False: it teaches nothing, and another is started in its place, up to `max_groups_per_step`."""


@dataclass(frozen=True)
class Updated:
    step: int


Event = Published | Finished | Updated


@dataclass
class _OpenStep:
    """A step whose groups were started and not sent to train."""

    step: int
    wanted: int
    """Groups that it trains."""
    started: list[int]
    waiting: set[int]
    """Started, not finished."""
    accepted: list[int]
    rejected: list[int]

    @property
    def groups(self) -> tuple[int, ...] | None:
        """Those to train, in the order of their ordinals, as soon as they are certain: rejected ones, oldest first,
        where not enough were accepted within the bound."""
        if self.waiting:
            return None
        spare = sorted(self.rejected)[: self.wanted - len(self.accepted)]
        return tuple(sorted([*self.accepted, *spare]))


class Schedule:
    """Which group may start, and which step may train, given what has happened.

    `begin` gives the first commands, `handle` those that an event allows. A driver carries commands out in order; it
    need not wait for a `Start` to come to its end before the next command.
    """

    def __init__(
        self,
        *,
        groups_per_step: int,
        last_step: int,
        done: int = 0,
        next_group: int = 0,
        max_staleness: int = 0,
        max_groups_per_step: int | None = None,
    ) -> None:
        """Stands before the first command.

        Args:
            groups_per_step: that a step trains.
            last_step: after which nothing is started.
            done: steps that lie behind (a resumed run).
            next_group: ordinal of the first group to start.
            max_staleness: steps by which the weights that begin a group may be older than those of a synchronous run.
            max_groups_per_step: that are started for a step where some are not accepted; None: `groups_per_step`, so
                that all are trained.
        """
        self.groups_per_step = groups_per_step
        self.last_step = last_step
        self.max_staleness = max_staleness
        self.trained = done
        """Newest step whose update is done."""
        self.served: int | None = None
        """Newest step whose weights every replica serves."""
        self._started = done
        """Newest step whose groups were started."""
        self._next_group = next_group
        self._max_groups = max(groups_per_step, max_groups_per_step or groups_per_step)
        self._open: deque[_OpenStep] = deque()
        """Oldest first."""
        self._training = False

    def begin(self) -> Sequence[Command]:
        """The first commands; none when the run is over already."""
        return [Publish(self.trained)] if self.trained < self.last_step else []

    def handle(self, event: Event) -> Sequence[Command]:
        """What may be done now that this has happened.

        Raises:
            ValueError: an event that cannot come now: a driver's mistake.
        """
        match event:
            case Published(step):
                self._expect(step == self.trained and (self.served is None or step > self.served), event)
                self.served = step
                return [*self._starts(), *self._train()]
            case Finished(group, accepted):
                found = next((open_step for open_step in self._open if group in open_step.waiting), None)
                self._expect(found is not None, event)
                return [] if found is None else [*self._finish(found, group, accepted), *self._train()]
            case Updated(step):
                self._expect(self._training and step == self.trained + 1, event)
                self.trained, self._training = step, False
                if self.trained == self.last_step:
                    return []
                return [Publish(self.trained)]

    @property
    def next_group(self) -> int:
        """Ordinal of the next group that will be started."""
        return self._next_group

    def _starts(self) -> list[Command]:
        """Every step that the law admits."""
        commands: list[Command] = []
        assert self.served is not None
        while self._started < min(self.served + 1 + self.max_staleness, self.last_step):
            self._started += 1
            step = _OpenStep(self._started, self.groups_per_step, [], set(), [], [])
            self._open.append(step)
            commands.append(self._start(step, self.groups_per_step))
        return commands

    def _start(self, step: _OpenStep, count: int) -> Start:
        groups = range(self._next_group, self._next_group + count)
        self._next_group = groups.stop
        step.started += groups
        step.waiting.update(groups)
        return Start(step.step, groups)

    def _finish(self, step: _OpenStep, group: int, accepted: bool) -> list[Command]:
        """Books a group; one that is not accepted is replaced as long as the bound allows."""
        step.waiting.discard(group)
        (step.accepted if accepted else step.rejected).append(group)
        if accepted or len(step.started) >= self._max_groups:
            return []
        return [self._start(step, 1)]

    def _train(self) -> list[Command]:
        """The oldest open step, when it is whole and its turn has come."""
        if self._training or not self._open or self.served != self.trained:
            return []
        groups = self._open[0].groups
        if groups is None:
            return []
        step = self._open.popleft()
        self._training = True
        return [Train(step.step, groups)]

    def _expect(self, condition: bool, event: Event) -> None:
        if not condition:
            raise ValueError(f"{event} cannot come now: trained {self.trained}, served {self.served}")
