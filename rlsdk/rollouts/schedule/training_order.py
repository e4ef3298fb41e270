"""Selects the groups that a step trains on: those that were started for it, or those that finished first. Pure."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlsdk.rollouts.schedule.events import Start


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The sizes of a schedule."""

    groups_per_step: int
    """Number of groups that a step trains on."""
    max_groups_per_step: int
    """Largest number of groups that are started for a step if some are not accepted."""
    last_step: int
    max_staleness: int
    drains: bool
    """Whether only groups of one step run at a time."""
    by_version: bool = False
    """With `drains`: whether groups of several steps run at a time, each step's under weights of its own."""
    done: int = 0
    """Steps that were done before: no older weights exist."""

    def version(self, step: int) -> int:
        """The step whose weights sample the groups of `step`, where that does not depend on time."""
        return max(self.done, step - 1 - self.max_staleness)

    def newest(self, served: int) -> int:
        """The newest step whose groups may start while the weights of step `served` are served."""
        return min(served + 1 + self.max_staleness, self.last_step)


class Order(ABC):
    """Groups that were started and not trained on yet."""

    running: int = 0
    """Started, not finished."""
    ungraded: set[int]
    """Running groups that need no further tokens."""
    next_group: int
    """Ordinal of the next group that will be started."""

    @property
    def drawing(self) -> int:
        """Number of groups that may still need tokens."""
        return self.running - len(self.ungraded)

    @abstractmethod
    def runs(self, group: int) -> bool:
        """Whether the group was started and is not finished."""

    @abstractmethod
    def start(self, served: int) -> list[Start]:
        """Starts every group that may start now."""

    @abstractmethod
    def finish(self, group: int, accepted: bool) -> list[Start] | None:
        """Records a finished group, and replaces one that is not accepted if the bound allows it; None: it does not
        run."""

    @abstractmethod
    def take(self, step: int) -> tuple[int, ...] | None:
        """Removes and returns the groups that this step trains, by ordinal; None if this is not certain yet."""

    @abstractmethod
    def has_started(self, step: int) -> bool:
        """Whether all groups of the steps up to this one were started."""

    def has_made(self, step: int) -> bool:
        """Whether all groups of the steps up to this one were started, and are finished."""
        return self.has_started(step) and not self.running


@dataclass
class _OpenStep:
    """A step whose groups were started but not trained yet."""

    step: int
    wanted: int
    started: int = 0
    waiting: set[int] = field(default_factory=set)
    """Started, not finished."""
    accepted: list[int] = field(default_factory=list)
    rejected: list[int] = field(default_factory=list)

    @property
    def groups(self) -> tuple[int, ...] | None:
        """The groups to train, by ordinal, as soon as they are certain; if not enough were accepted within the bound,
        rejected ones fill up, oldest first."""
        if self.waiting:
            return None
        spare = sorted(self.rejected)[: self.wanted - len(self.accepted)]
        return tuple(sorted([*self.accepted, *spare]))


class PromptOrder(Order):
    """A step trains the groups that were started for it."""

    def __init__(
        self,
        limits: Limits,
        *,
        done: int,
        next_group: int,
        again: Mapping[int, Sequence[int]],
        planned: Mapping[int, Sequence[int]],
    ) -> None:
        """As `FinishOrder`; `planned` follows from the order of the prompts anyway."""
        self._limits = limits
        self._again = dict(again)
        self._started = done
        """Newest step whose groups were started."""
        self.next_group = next_group
        self.ungraded = set()
        self._open: deque[_OpenStep] = deque()
        """Oldest first."""

    def runs(self, group: int) -> bool:
        return any(group in step.waiting for step in self._open)

    def start(self, served: int) -> list[Start]:
        """See `Order`. If samples drain, a step begins when the previous one is sampled, or the previous one of the
        same weights: the groups that share a decoding step must not depend on timing."""
        commands: list[Start] = []
        while self._started < self._limits.newest(served) and not self._must_wait():
            self._started += 1
            step = _OpenStep(self._started, self._limits.groups_per_step)
            self._open.append(step)
            again = self._again.pop(self._started, ())
            commands.append(self._begin(step, again, self._limits.groups_per_step - len(again)))
        return commands

    def _must_wait(self) -> bool:
        """Whether the next step waits for samples."""
        if not self._limits.by_version:
            return self._limits.drains and bool(self.drawing)
        last = self._open[-1] if self._open else None
        same = last is not None and self._limits.version(last.step) == self._limits.version(last.step + 1)
        return last is not None and same and bool(last.waiting - self.ungraded)

    def finish(self, group: int, accepted: bool) -> list[Start] | None:
        step = next((step for step in self._open if group in step.waiting), None)
        if step is None:
            return None
        step.waiting.discard(group)
        self.ungraded.discard(group)
        self.running -= 1
        (step.accepted if accepted else step.rejected).append(group)
        if accepted or step.started >= self._limits.max_groups_per_step:
            return []
        return [self._begin(step, (), 1)]

    def take(self, step: int) -> tuple[int, ...] | None:
        if not self._open or self._open[0].step != step:
            return None
        groups = self._open[0].groups
        if groups is not None:
            self._open.popleft()
        return groups

    def has_started(self, step: int) -> bool:
        return self._started >= step

    def has_made(self, step: int) -> bool:
        return self.has_started(step) and not any(open_.waiting for open_ in self._open if open_.step <= step)

    def _begin(self, step: _OpenStep, again: Sequence[int], count: int) -> Start:
        fresh = range(self.next_group, self.next_group + count)
        self.next_group = fresh.stop
        groups = [*again, *fresh] if again else fresh
        step.started += len(groups)
        step.waiting.update(groups)
        self.running += len(groups)
        return Start(step.step, groups, self._limits.version(step.step) if self._limits.by_version else None)


class FinishOrder(Order):
    """A step trains the groups that finished first, provided that all others can still be trained within their bound.

    For every later step j: of the groups with a bound of at most j, as many are trained now as the steps up to j cannot
    take. No more groups are started than these steps can train, so this is always possible: no group is dropped for its
    age, and none is trained after its bound.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        done: int,
        next_group: int,
        again: Mapping[int, Sequence[int]],
        planned: Mapping[int, Sequence[int]],
    ) -> None:
        """Starts before the first group.

        Args:
            limits: sizes of the schedule.
            done: number of steps that were done before.
            next_group: ordinal of the first new group.
            again: groups that were started before and are generated again, by the step that is their bound.
            planned: groups of steps that were trained before, and are trained again.
        """
        self._limits = limits
        self._planned = dict(planned)
        self._keep = {group for groups in planned.values() for group in groups}
        self._again = dict(again)
        self.next_group = next_group
        self.ungraded = set()
        self._admitted = done * limits.groups_per_step
        """Groups that were started and not rejected, trained ones included."""
        self._due: dict[int, int] = {}
        """Running group -> latest step in which it is trained."""
        self._running: dict[int, int] = {}
        """Number of running groups, by that step."""
        self._finished: dict[int, deque[tuple[int, int]]] = {}
        """(Order of finishing, ordinal) of finished groups, by that step."""
        self._num_finished = 0
        self._rejected = 0
        """Number of rejected groups since the last trained step."""

    def runs(self, group: int) -> bool:
        return group in self._due

    def start(self, served: int) -> list[Start]:
        """See `Order`. AReaL's admission (arXiv 2505.24298, section 4.2) in groups."""
        commands = [self._begin(due, groups) for due, groups in sorted(self._again.items())]
        self._again.clear()
        newest = self._limits.newest(served)
        count = newest * self._limits.groups_per_step - self._admitted
        if count > 0:
            commands.append(self._fresh(newest, count))
        return commands

    def finish(self, group: int, accepted: bool) -> list[Start] | None:
        due = self._due.pop(group, None)
        if due is None:
            return None
        self.ungraded.discard(group)
        self.running -= 1
        self._running[due] -= 1
        spare = self._limits.max_groups_per_step - self._limits.groups_per_step
        if not accepted and self._rejected < spare and group not in self._keep:
            self._rejected += 1
            self._admitted -= 1
            return [self._fresh(due, 1)]
        self._num_finished += 1
        self._finished.setdefault(due, deque()).append((self._num_finished, group))
        return []

    def take(self, step: int) -> tuple[int, ...] | None:
        if step in self._planned:
            return self._take_planned(step)
        wanted = self._limits.groups_per_step
        needed = self._needed(step)
        if needed is None:
            return None
        chosen: list[tuple[int, int]] = []
        pool: list[tuple[int, int]] = []
        for due, least in needed:
            pool = list(heapq.merge(pool, self._finished.get(due, ())))
            short = max(least - len(chosen), 0)
            chosen += pool[:short]
            pool = pool[short:]
        chosen += pool[: wanted - len(chosen)]
        groups = {group for _, group in chosen}
        self._remove(groups)
        return tuple(sorted(groups))

    def _take_planned(self, step: int) -> tuple[int, ...] | None:
        """The groups that this step trained before the restart, as soon as all are finished."""
        groups = set(self._planned[step])
        if not groups <= {group for items in self._finished.values() for _, group in items}:
            return None
        del self._planned[step]
        self._remove(groups)
        return tuple(sorted(groups))

    def _remove(self, groups: set[int]) -> None:
        for due, items in self._finished.items():
            if any(group in groups for _, group in items):
                self._finished[due] = deque(item for item in items if item[1] not in groups)
        self._rejected = 0

    def has_started(self, step: int) -> bool:
        return not self._again and self._admitted >= step * self._limits.groups_per_step

    def _needed(self, step: int) -> list[tuple[int, int]] | None:
        """For each bound, how many groups of it or of an earlier one this step must train; None: too few finished."""
        wanted, finished, untrained = self._limits.groups_per_step, 0, 0
        needed = []
        for due in range(step, step + self._limits.max_staleness + 1):
            here = len(self._finished.get(due, ()))
            finished += here
            untrained += here + self._running.get(due, 0)
            least = untrained - (due - step) * wanted
            if finished < least:
                return None
            needed.append((due, least))
        return needed if finished >= wanted else None

    def _fresh(self, due: int, count: int) -> Start:
        groups = range(self.next_group, self.next_group + count)
        self.next_group = groups.stop
        return self._begin(due, groups)

    def _begin(self, due: int, groups: Sequence[int]) -> Start:
        self._due.update(dict.fromkeys(groups, due))
        self._running[due] = self._running.get(due, 0) + len(groups)
        self._admitted += len(groups)
        self.running += len(groups)
        return Start(due, groups)
