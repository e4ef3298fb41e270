"""Source of each step's groups: executes a schedule's commands on the stream, and collects the groups of a step."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlsdk.cluster.ray_cluster.daemons import controller_seconds
from rlsdk.config import ScheduleConfig
from rlsdk.data import PromptStream
from rlsdk.rollouts import Finished, Group, GroupTask, Published, RolloutStream, Schedule, Updated
from rlsdk.rollouts.schedule.events import Event
from rlsdk.trainer.generation.driver import ScheduleDriver
from rlsdk.trainer.generation.history import History
from rlsdk.trainer.generation.ledger import Ledger
from rlsdk.trainer.generation.publishing import Done, Publisher
from rlsdk.trainer.generation.sampler import Draw, group_task
from rlsdk.trainer.generation.timeline import Lengths, Timeline
from rlsdk.trainer.tracking.pool_times import PoolTimes
from rlsdk.trainer.tracking.stopping import PreemptedError


@dataclass(frozen=True, kw_only=True)
class StepGroups:
    """The groups of a step."""

    step: int
    groups: list[Group]
    """Groups to train on, in data order."""
    rejected: list[Group] = field(default_factory=list)
    """Groups that were finished for the step but not trained on."""
    num_reused: int = 0
    """Samples of the groups that come from the journal."""


def group_seed(seed: int, ordinal: int, groups_per_step: int) -> tuple[int | str, ...]:
    """The seed of a group: of the step that trains it in a synchronous run, and of its index in that step."""
    return (seed, "train", *divmod(ordinal, groups_per_step))


class GroupSource:
    """`next` returns the groups of a step; `updated` reports that their update is done. Groups start and weights are
    published while a step trains: implements the `Work` of a `ScheduleDriver`."""

    def __init__(
        self,
        stream: RolloutStream,
        prompts: PromptStream,
        draw: Draw,
        *,
        groups_per_step: int,
        steps: int,
        seed: int,
        publisher: Publisher,
        schedule: ScheduleConfig,
        accept: Callable[[Group], bool] = lambda group: True,
        max_groups_per_step: int | None = None,
        history: History | None = None,
        times: Path | None = None,
        by_version: bool = False,
    ) -> None:
        """Starts nothing.

        Args:
            stream: samples and grades the groups; `close` closes it.
            prompts: the training prompts in order.
            draw: how groups are sampled.
            groups_per_step: groups that a step trains on.
            steps: number of steps of the whole stage.
            seed: seed of the run.
            publisher: syncs weights to every replica.
            schedule: decides when groups start and which groups a step trains on.
            accept: whether a group has a training signal; a group without one is replaced. Called on the driver's
                thread.
            max_groups_per_step: largest number of groups started for one step. If too few are accepted, rejected groups
                are trained on, too.
            history: the run's journal; `close` closes it. None: no journal.
            times: file for the timeline of the pools; None: nothing is written.
            by_version: each group names the version that samples it (`Capability.ADAPTER_VERSIONS`), and weights are
                published while others run.
        """
        self._history = history or History()
        self._stream = stream
        self._groups_per_step = groups_per_step
        self._steps = steps
        self._accept = accept
        self._max_groups_per_step = max_groups_per_step
        self._config, self._by_version = schedule, by_version
        self._version_of: dict[int, int] = {}
        """Step whose weights were published -> their version."""
        self._ledger = Ledger(prompts)
        self._driver = ScheduleDriver(self._schedule_from(0), self)
        self._draw = draw
        self._seed = seed
        self._publisher = publisher
        self._ready: queue.SimpleQueue[StepGroups | BaseException] = queue.SimpleQueue()
        self._due: list[Event] = []
        """Events that a synchronous run handles at the next call of `next`: until then training uses the devices."""
        self._finished: dict[int, Group] = {}
        self._reused: dict[int, int] = {}
        """Groups with samples from before a resume: ordinal -> number of these samples."""
        self._rejected: set[int] = set()
        """The finished groups that were not accepted."""
        self._current = StepGroups(step=0, groups=[])
        self._state = self._ledger.state_dict()
        self.timeline = Timeline(stream.busy_s, Lengths(groups_per_step), stream.concurrency, controller_seconds)
        self._times = PoolTimes(times)

    def begin(self, step: int) -> None:
        """Called before the first `next` of this process; `step` is the number of steps already done."""
        self._times.begin(step, resumed=self._history.is_resumed)
        self._history.begin(step)

    def next(self) -> list[Group]:
        """Waits for the groups of the next step; returns them in the order of the data.

        Raises:
            Exception: the error that ended the rollout or a publish.
        """
        self._current = StepGroups(step=self._current.step, groups=[])  # else they stay while the next ones are made
        if not self._driver.has_begun:
            self._driver.begin()
        if self._config.overlaps:
            self._driver.pause_starts(False)
        for event in self._due:
            self._driver.inbox.put(event)
        self._due.clear()
        with self.timeline.waiting():
            group = self._ready.get()
        if isinstance(group, BaseException):
            raise group
        self._current = group
        self._times.note("train", group.step)
        return group.groups

    def updated(self, figures: Mapping[str, float] | None = None, *, pause: bool = False) -> None:
        """Reports that the update on the groups of the last `next` is done.

        Args:
            figures: metrics that a replay must reproduce.
            pause: `serve` follows, so nothing may start with the new weights before it.
        """
        self._times.note("trained", self._current.step)
        self._times.write(self._current.step)
        self._history.updated(self._current.step, self._current.groups, self._current.rejected, figures or {})
        if not self._config.overlaps:
            self._close_groups()
            self._due.append(Updated(self._current.step))
        else:
            if pause:
                self._driver.pause_starts(self._drains)
            self._driver.inbox.put(Updated(self._current.step))
            self._driver.wait(lambda: self._schedule.trained == self._current.step)

    def serve(self) -> bool:
        """Makes every replica serve the newest weights, without running groups if samples drain, until `settle` or
        `next`. False if the caller must publish the weights itself: the run is synchronous, has not begun, or is
        over."""
        if not self._config.overlaps or not self._driver.has_begun:
            return False
        self._driver.pause_starts(self._drains)
        self._driver.wait(lambda: self._schedule.settled and self._driver.starts_are_paused is self._drains)
        return self._schedule.served == self._schedule.trained

    def settle(self, timeout_s: float | None = None) -> bool:
        """Waits until the newest weights are served; if samples drain, all samples of older weights are finished then.
        False on timeout, or if the rollout has failed (`failure`)."""
        if self._config.overlaps and self._driver.has_begun:
            if not self._driver.wait(lambda: self._schedule.settled, timeout_s):
                return False
            if self._drains and self._driver.failure is not None:
                return False  # the schedule stopped at the failure: it may have missed the last update
            self._driver.pause_starts(False)
        return True

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the rollout or a publish; None while they run."""
        return self._driver.failure

    def preempt(self) -> None:
        """Makes `next` raise a `PreemptedError`, now or when it is called. Safe in a signal handler."""
        self._ready.put(PreemptedError("preempted: this machine is being reclaimed"))

    def halt(self, timeout_s: float) -> None:
        """Stops running samples for good; writes their partial results into the journal."""
        self._history.halted(self._stream.halt(timeout_s))

    @property
    def rejected(self) -> Sequence[Group]:
        """Groups that were finished since the previous step and are not trained on."""
        return self._current.rejected

    @property
    def num_reused(self) -> int:
        """Samples that the last `next` took from the journal: they were made before the resume."""
        return self._current.num_reused

    @property
    def epoch(self) -> int:
        """Full passes over the data up to the last step that was trained."""
        return int(self._state["prompts"]["epoch"])

    def state_dict(self) -> Mapping[str, Any]:
        """State of the data after the last trained step, and the groups that were started but not trained on, which a
        resumed run generates again."""
        return {**self._state, "journal": self._history.run}

    def saving(self, step: int) -> None:
        """Called when a checkpoint of this step begins."""
        self._history.saving(step)

    def saved(self, step: int, oldest: int) -> None:
        """Called when a checkpoint of this step is complete; the oldest kept checkpoint is of step `oldest`."""
        self._history.saved(oldest)

    def load_state_dict(self, state: Mapping[str, Any], *, step: int, version: int) -> None:
        """Restores `state`, which was saved after `step` with weights of this version. Samples from before the restart
        are reused.

        Raises:
            CheckpointError: the data changed, or the journal is damaged.
        """
        self._ledger.load_state_dict(state)
        # If groups are replaced, the order of replacement depends on timing: a sample may end up in an earlier step.
        refills = self._max_groups_per_step is not None and (self._by_version or not self._drains)
        partial = self._history.resume(
            step,
            run=state.get("journal"),
            needed=lambda group: group in self._ledger.open or group >= self._ledger.next_group,
            newest_version=version if refills else None,
        )
        self._stream.continue_from(partial)
        self._driver.schedule = self._schedule_from(step)
        self._state = self._ledger.state_dict()

    def close(self) -> None:
        self._driver.end()
        self._stream.close()
        self._driver.join()
        self._history.close()

    @property
    def _schedule(self) -> Schedule:
        return self._driver.schedule

    @property
    def _drains(self) -> bool:
        return self._config.on_new_weights == "drain"

    def _schedule_from(self, step: int) -> Schedule:
        return Schedule(
            groups_per_step=self._groups_per_step,
            last_step=self._steps,
            done=step,
            next_group=self._ledger.next_group,
            max_staleness=self._config.max_staleness,
            order=self._config.order,
            drains=self._drains,
            by_version=self._by_version,
            max_groups_per_step=self._max_groups_per_step,
            again=self._ledger.open_by_step(),
            planned=self._history.planned,
        )

    # Of `Work`, on the driver's thread:

    def record(self, item: Group | Event) -> Event:
        match item:
            case Group():
                ordinal, accepted = item.task.ordinal, self._accept(item)
                self._finished[ordinal] = item
                if not accepted:
                    self._rejected.add(ordinal)
                self.timeline.lengths.made(item, accepted=accepted)
                self._times.note("made", self._ledger.open[ordinal])
                return Finished(ordinal, accepted)
            case Updated(step):
                if self._config.overlaps:
                    self._close_groups()
                self.timeline.updated(step)
            case Published(step):
                if self._by_version and (report := self._publisher.last_report) is not None:
                    self._version_of[step] = report.version
                self._history.published(step)
                self.timeline.published(step)
                self._times.note("served", step)
        return item

    def start(self, step: int, groups: Sequence[int], weights: int | None) -> None:
        self.timeline.lengths.started(groups)
        self._times.note("start", step, len(groups))
        self._history.started(step, groups)
        version = None if weights is None else self._version_of[weights]
        tasks = [replace(self._task(ordinal, step), adapter_version=version) for ordinal in groups]
        made = {task.ordinal: samples for task in tasks if (samples := self._history.made(task)) is not None}
        self._reused |= {ordinal: len(samples) for ordinal, samples in made.items()}
        begun = {task.ordinal: found for task in tasks if (found := self._history.begun(task))}
        reports_sampled = self._config.overlaps and self._drains
        self._stream.start(
            tasks,
            self._driver.inbox,
            record=self._history.record,
            made=made,
            begun=begun,
            reports_sampled=reports_sampled,
        )

    def train(self, step: int, groups: Sequence[int]) -> None:
        self._history.taken(step, groups)
        self._ready.put(self._gather(step, groups))

    def publish(self, step: int, done: Done) -> None:
        self._times.note("publish", step)
        self._publisher.publish(done)

    def snapshot_weights(self, step: int) -> None:
        self._times.note("hold", step)
        with self.timeline.holding():
            self._publisher.snapshot()

    def snapshot_ready(self, step: int) -> None:
        self._times.note("held", step)

    def failed(self, error: BaseException) -> None:
        self._ready.put(error)

    def _gather(self, step: int, ordinals: Sequence[int]) -> StepGroups:
        """Removes and returns the groups of a step, with the groups that were rejected for it."""
        groups = [self._finished.pop(ordinal) for ordinal in ordinals]
        self._rejected.difference_update(ordinals)
        # With order `finish`, also rejected groups of later steps: no step waits for them.
        last = step if self._config.order == "prompt" else step + self._config.max_staleness
        gone = sorted(ordinal for ordinal in self._rejected if self._ledger.open[ordinal] <= last)
        self._rejected.difference_update(gone)
        self.timeline.lengths.trained(groups)
        rejected = [self._finished.pop(ordinal) for ordinal in gone]
        num_reused = sum(self._reused.pop(ordinal, 0) for ordinal in (*ordinals, *gone))
        return StepGroups(step=step, groups=groups, rejected=rejected, num_reused=num_reused)

    def _close_groups(self) -> None:
        """Closes the trained and the rejected groups of the current step in the ledger."""
        done = [*self._current.groups, *self._current.rejected]
        self._ledger.close(group.task.ordinal for group in done)
        self._state = self._ledger.state_dict()

    def _task(self, ordinal: int, step: int) -> GroupTask:
        """Builds the task of the group with this ordinal."""
        prompt, epoch = self._ledger.start(ordinal, step)
        seed = group_seed(self._seed, ordinal, self._groups_per_step)
        return group_task(prompt, self._draw, epoch=epoch, ordinal=ordinal, seed=seed)
