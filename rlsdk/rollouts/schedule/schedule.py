"""The schedule of a run as a pure state machine. Events in, commands out; no clock, no I/O.

One rule: *a group for step k may start once the weights of step k - 1 - max_staleness are served, and nothing older
is trained on.* With `max_staleness` 0 the run is synchronous.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from rlsdk.rollouts.schedule.events import (
    Command,
    Event,
    Finished,
    Publish,
    Published,
    Sampled,
    Snapshot,
    Start,
    Train,
    Updated,
)
from rlsdk.rollouts.schedule.training_order import FinishOrder, Limits, Order, PromptOrder


class Schedule:
    """Decides which groups may start and which step may train, from past events.

    `begin` returns the first commands, `handle` those that an event allows. A driver executes commands in order; it
    need not wait for the end of a `Start`, a `Publish` or a `Train` before the next command.

    With `max_staleness` above 0, weights are copied (`Snapshot`) after an update, and published while the next step
    trains. At most one version waits: until it is published, the step after the next one does not train.

    With `drains` the groups of step k are generated completely with the weights of step k - 1 - `max_staleness` (at
    least 0), and only one step's groups run at once, regardless of timing.

    With `by_version`, too, they are generated completely with those weights, which their `Start` names. The replicas
    serve the newest `max_staleness + 1` weights side by side: groups of as many steps run at once, and a publish waits
    for none of them.
    """

    def __init__(
        self,
        *,
        groups_per_step: int,
        last_step: int,
        done: int = 0,
        next_group: int = 0,
        max_staleness: int = 0,
        order: Literal["prompt", "finish"] = "prompt",
        drains: bool = True,
        by_version: bool = False,
        max_groups_per_step: int | None = None,
        again: Mapping[int, Sequence[int]] | None = None,
        planned: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        """Initializes the state before the first command.

        Args:
            groups_per_step: number of groups that a step trains.
            last_step: the step after which nothing is started.
            done: number of steps that were done before (in a resumed run).
            next_group: ordinal of the first new group to start.
            max_staleness: number of steps by which a group's first weights may be older than in a synchronous run.
            order: `prompt`: a step trains the groups that were started for it; `finish`: those that finished first.
            drains: weights are published only when no group samples tokens; grades may still be missing.
            by_version: with `drains` and order `prompt`: weights are published at any time, because groups name theirs.
            max_groups_per_step: largest number of groups started for a step if some are not accepted; None:
                `groups_per_step`, so that all are trained.
            again: groups that were started before a restart and not trained, by the step of their `Start`.
            planned: groups that steps after `done` trained before the restart and train again.
        """
        most = max(groups_per_step, max_groups_per_step or groups_per_step)
        self.limits = Limits(
            groups_per_step=groups_per_step,
            max_groups_per_step=most,
            last_step=last_step,
            max_staleness=max_staleness,
            drains=drains,
            by_version=by_version,
            done=done,
        )
        self.trained = done
        """Newest step whose update is done."""
        self.served: int | None = None
        """Newest step whose weights every replica serves."""
        kind = PromptOrder if order == "prompt" else FinishOrder
        self._order: Order = kind(
            self.limits, done=done, next_group=next_group, again=again or {}, planned=planned or {}
        )
        self._copied = done
        """Newest step whose weights were copied or published."""
        self._publishing = False
        self._training = False
        self._older: set[int] = set()
        """Groups that had no grades yet when newer weights than theirs were published."""

    @property
    def next_group(self) -> int:
        """Ordinal of the next group that will be started."""
        return self._order.next_group

    @property
    def running(self) -> int:
        """Number of running groups."""
        return self._order.running

    @property
    def serves_newest(self) -> bool:
        """Whether groups that start now start with the newest weights."""
        return self.served == self.trained and not self._publishing

    @property
    def settled(self) -> bool:
        """Whether the newest weights are served or no longer needed; if samples drain, also whether all samples of
        older weights are generated and graded."""
        if self._publishing or self._older:
            return False
        if self.serves_newest:
            older = min(self.trained + self.limits.max_staleness, self.limits.last_step)
            return not self.limits.by_version or self._order.has_made(older)
        return self._needs_no_weights() and not self._order.running

    def starts_newest(self, start: Start) -> bool:
        """Whether these groups start with the newest weights."""
        return self.serves_newest and start.weights in (None, self.trained)

    def begin(self) -> Sequence[Command]:
        """The first commands; none if the run is already over."""
        if self.trained >= self.limits.last_step:
            return []
        self._publishing = True
        return [Publish(self.trained)]

    def handle(self, event: Event) -> Sequence[Command]:
        """Returns the commands that this event allows.

        Raises:
            ValueError: the event is impossible in this state: a bug in the driver.
        """
        match event:
            case Published(step):
                self._expect(self._publishing and step == self._copied, event)
                self.served, self._publishing = step, False
                return self._follow(self._order.start(step))
            case Sampled(group):
                self._expect(self._order.runs(group), event)
                if not self._replaces_groups:
                    self._order.ungraded.add(group)
                return self._follow([])
            case Finished(group, accepted):
                self._older.discard(group)
                commands = self._order.finish(group, accepted)
                self._expect(commands is not None, event)
                return self._follow(commands or [])
            case Updated(step):
                self._expect(self._training and step == self.trained + 1, event)
                self.trained, self._training = step, False
                return self._follow([])

    def _follow(self, starts: Sequence[Start]) -> list[Command]:
        """Returns the commands that follow from the current state."""
        commands: list[Command] = list(starts)
        if self.limits.drains and self.served is not None and (self.limits.by_version or self._is_idle()):
            commands += self._order.start(self.served)
        return [*commands, *self._snapshot(), *self._publish(), *self._train()]

    def _is_idle(self) -> bool:
        """Whether no tokens are sampled, and no weights on their way."""
        return not self._order.drawing and not self._publishing

    def _snapshot(self) -> list[Command]:
        """Copies weights (`Snapshot`) as soon as the previous ones are published."""
        if self._copied == self.trained or self._copied != self.served or self._needs_no_weights():
            return []
        self._copied = self.trained
        return [Snapshot(self.trained)] if self.limits.max_staleness else []

    def _publish(self) -> list[Command]:
        if self._publishing or self._copied == self.served or self._needs_no_weights():
            return []
        drains = self.limits.drains and not self.limits.by_version
        if drains and not self._is_drained():
            return []
        self._publishing = True
        if drains:
            self._older |= self._order.ungraded
        return [Publish(self._copied)]

    @property
    def _replaces_groups(self) -> bool:
        """Whether a group's grades may lead to a replacement group with the same weights."""
        return self.limits.max_groups_per_step > self.limits.groups_per_step

    def _is_drained(self) -> bool:
        """Whether all groups that the served weights may start are started and fully sampled."""
        assert self.served is not None
        return not self._order.drawing and self._order.has_started(self.limits.newest(self.served))

    def _train(self) -> list[Command]:
        """Trains the next step once its groups are complete and it is its turn."""
        if self._training or self.trained == self.limits.last_step:
            return []
        if self._copied != self.trained and not self._needs_no_weights():
            return []  # The update would change weights that must still be published.
        if not self.limits.max_staleness and self.served != self.trained:
            return []
        groups = self._order.take(self.trained + 1)
        if groups is None:
            return []
        self._training = True
        return [Train(self.trained + 1, groups)]

    def _needs_no_weights(self) -> bool:
        """Whether no more tokens will be sampled with newer weights than those served now."""
        done = self.limits.drains or not self._order.running
        return done and self._order.has_started(self.limits.last_step)

    def _expect(self, condition: bool, event: Event) -> None:
        if not condition:
            raise ValueError(f"{event} cannot come now: trained {self.trained}, served {self.served}")
