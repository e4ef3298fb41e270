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


@dataclass(frozen=True)
class Updated:
    step: int


Event = Published | Finished | Updated


class Schedule:
    """Which group may start, and which step may train, given what has happened.

    `begin` gives the first commands, `handle` those that an event allows. A driver carries commands out in order; it
    need not wait for a `Start` to come to its end before the next command.
    """

    def __init__(
        self, *, groups_per_step: int, last_step: int, done: int = 0, next_group: int = 0, max_staleness: int = 0
    ) -> None:
        """Stands before the first command.

        Args:
            groups_per_step: that a step trains.
            last_step: after which nothing is started.
            done: steps that lie behind (a resumed run).
            next_group: ordinal of the first group to start.
            max_staleness: steps by which the weights that begin a group may be older than those of a synchronous run.
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
        self._open: deque[tuple[int, range]] = deque()
        """Steps that were started and not sent to train, oldest first."""
        self._finished: set[int] = set()
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
            case Finished(group):
                known = any(group in groups for _, groups in self._open)
                self._expect(known and group not in self._finished, event)
                self._finished.add(group)
                return self._train()
            case Updated(step):
                self._expect(self._training and step == self.trained + 1, event)
                self.trained, self._training = step, False
                if self.trained == self.last_step:
                    return []
                return [Publish(self.trained)]

    def _starts(self) -> list[Command]:
        """Every step that the law admits."""
        commands: list[Command] = []
        assert self.served is not None
        while self._started < min(self.served + 1 + self.max_staleness, self.last_step):
            self._started += 1
            groups = range(self._next_group, self._next_group + self.groups_per_step)
            self._next_group = groups.stop
            self._open.append((self._started, groups))
            commands.append(Start(self._started, groups))
        return commands

    def _train(self) -> list[Command]:
        """The oldest open step, when it is whole and its turn has come."""
        if self._training or not self._open or self.served != self.trained:
            return []
        step, groups = self._open[0]
        if not self._finished.issuperset(groups):
            return []
        self._open.popleft()
        self._finished.difference_update(groups)
        self._training = True
        return [Train(step, tuple(groups))]

    def _expect(self, condition: bool, event: Event) -> None:
        if not condition:
            raise ValueError(f"{event} cannot come now: trained {self.trained}, served {self.served}")
