"""Simulates a schedule in virtual time: the real state machine, with replicas and a training pool that only count."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, auto

from rlsdk.planning.rates import Rates, Setting, Simulated
from rlsdk.planning.replica import Replica
from rlsdk.rollouts import Finished, Publish, Published, Sampled, Schedule, Snapshot, Start, Train, Updated
from rlsdk.rollouts.schedule.events import Command


class _Kind(IntEnum):
    """Kind of an event."""

    DECODED = auto()
    """A replica has sampled the last token of a sample."""
    SAMPLED = auto()
    """The controller has received the sample."""
    GRADED = auto()
    """A sample is graded."""
    UPDATED = auto()
    """The update of a step is done."""
    PUBLISHED = auto()
    """Every replica serves the weights of a step."""


@dataclass(kw_only=True)
class _Clock:
    """Future events by time, then in the order in which they were scheduled."""

    heap: list[tuple[float, int, _Kind, int, int]] = field(default_factory=list)
    count: itertools.count[int] = field(default_factory=itertools.count)

    def plan(self, at: float, kind: _Kind, what: int, stamp: int = 0) -> None:
        heapq.heappush(self.heap, (at, next(self.count), kind, what, stamp))


@dataclass(kw_only=True)
class _Training:
    """The step in training."""

    step: int
    left_s: float
    """Remaining seconds without concurrent work."""
    since: float
    stamp: int = 0


class Simulation:
    """Simulation of one setting, from the first step to the last."""

    def __init__(self, setting: Setting, rates: Rates, lengths: Sequence[int], *, steps: int) -> None:
        """`lengths`: tokens of each sample, by group, repeated cyclically."""
        self.setting, self.rates, self.lengths, self.steps = setting, rates, lengths, steps
        replicas = max(setting.rollout_devices // rates.devices_per_replica, 1)
        self.replicas = [Replica(rates) for _ in range(replicas)]
        self.load = [(0, at) for at in range(replicas)]
        """Outstanding samples by replica; a heap that may contain outdated entries."""
        self.outstanding = [0] * replicas
        self.left: dict[int, int] = {}
        """Ungraded samples by group."""
        self.drawing: dict[int, int] = {}
        """Running samples by group."""
        self.tokens: dict[int, int] = {}
        self.began: dict[int, int] = {}
        """By group: the step whose weights were served when it began."""
        self.clock = _Clock()
        self.chance = random.Random(0)
        self.training: _Training | None = None
        self.slowdown = 1.0
        self.now = 0.0
        self.paused = False
        self.served = 0
        self.published_at: list[float] = []
        self.ends: list[float] = []
        self.trained_s: list[float] = []
        self.stale: list[list[int]] = []
        """Number of samples of each age, by step."""
        self.num_events = 0
        self.schedule = Schedule(
            groups_per_step=setting.groups_per_step,
            last_step=steps,
            max_staleness=setting.max_staleness,
            order="finish" if setting.partial else "prompt",
            drains=not setting.partial,
        )

    def run(self) -> Simulated:
        """Runs until the end of the last step."""
        self.carry_out(self.schedule.begin())
        while self.clock.heap:
            at, _, kind, what, stamp = heapq.heappop(self.clock.heap)
            self.now = at
            match kind:
                case _Kind.DECODED:
                    self.sample_ended(what, stamp)
                case _Kind.SAMPLED:
                    self.sampled(what)
                case _Kind.GRADED:
                    self.graded(what)
                case _Kind.UPDATED:
                    self.updated(what, stamp)
                case _Kind.PUBLISHED:
                    self.resume(what)
            if self.rates.cores:
                self.share_cores()
        return self.result()

    def result(self) -> Simulated:
        first, last = self.window()
        passed = self.ends[last] - self.ends[first]
        places = len(self.replicas) * self.rates.max_running * self.ends[-1]
        stale = [sum(counts[age] for counts in self.stale[first : last + 1]) for age in range(len(self.stale[0]))]
        return Simulated(
            step_s=passed / (last - first),
            train_idle=max(1.0 - sum(self.trained_s[first + 1 : last + 1]) / passed, 0.0),
            rollout_idle=max(1.0 - sum(replica.occupied for replica in self.replicas) / places, 0.0),
            staleness=[count / max(sum(stale), 1) for count in stale],
            num_events=self.num_events,
        )

    def window(self) -> tuple[int, int]:
        """Range of steps that are measured: after the pipeline is filled, and before it drains."""
        edge = self.setting.max_staleness + 1
        return (edge, self.steps - 1 - edge) if self.setting.max_staleness else (0, self.steps - 1)

    def tell(self, event: Finished | Published | Sampled | Updated) -> None:
        self.num_events += 1
        self.carry_out(self.schedule.handle(event))

    def carry_out(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Start(_, groups):
                    self.start(groups)
                case Train(step, groups):
                    self.train(step, groups)
                case Publish(step):
                    self.publish(step)
                case Snapshot():
                    pass

    def start(self, groups: Sequence[int]) -> None:
        """Starts a group on the replica with the least outstanding work."""
        count, touched, rates = self.setting.samples_per_group, set(), self.rates
        for group in groups:
            at = self.least()
            replica = self.replicas[at]
            if at not in touched:
                replica.advance(self.now, paused=self.paused)
                replica.pace = self.vary(rates.decode_variation)
                touched.add(at)
            first = group * count
            lengths = [self.lengths[(first + k) % len(self.lengths)] for k in range(count)]
            replica.waiting.extend((group, length) for length in lengths)
            self.left[group] = self.drawing[group] = count
            self.tokens[group], self.began[group] = sum(lengths), self.served
            self.outstanding[at] += count
            heapq.heappush(self.load, (self.outstanding[at], at))
        for at in touched:
            self.replan(at)

    def vary(self, variation: float) -> float:
        """A random factor with mean 1; the same sequence in every simulation."""
        return math.exp(self.chance.gauss(-0.5 * variation**2, variation)) if variation else 1.0

    def least(self) -> int:
        while self.load[0][0] != self.outstanding[self.load[0][1]]:
            heapq.heappop(self.load)
        return self.load[0][1]

    def replan(self, at: int) -> None:
        """Schedules a replica's next finished sample again, after a change."""
        replica = self.replicas[at]
        replica.fill()
        replica.stamp += 1
        end = None if self.paused else replica.next_end()
        if end is not None:
            self.clock.plan(end, _Kind.DECODED, at, replica.stamp)

    def sample_ended(self, at: int, stamp: int) -> None:
        replica = self.replicas[at]
        if stamp != replica.stamp:
            return
        replica.advance(self.now, paused=False)
        end, group = heapq.heappop(replica.heap)
        replica.made = max(replica.made, end)
        replica.admitted -= replica.admitted / (len(replica.heap) + 1)
        self.outstanding[at] -= 1
        heapq.heappush(self.load, (self.outstanding[at], at))
        self.replan(at)
        if self.rates.latency_s:
            self.clock.plan(self.now + self.rates.latency_s, _Kind.SAMPLED, group)
        else:
            self.sampled(group)

    def sampled(self, group: int) -> None:
        """The controller receives a sample of a group."""
        self.drawing[group] -= 1
        if not self.drawing[group]:
            del self.drawing[group]
            if self.setting.drains and self.rates.grade_s:
                self.tell(Sampled(group))
        if self.rates.grade_s:
            self.clock.plan(self.now + self.rates.grade_s, _Kind.GRADED, group)
        else:
            self.graded(group)

    def graded(self, group: int) -> None:
        """A sample of a group is graded."""
        self.left[group] -= 1
        if not self.left[group]:
            del self.left[group]
            self.tell(Finished(group))

    def train(self, step: int, groups: Sequence[int]) -> None:
        ages = [0] * (self.setting.max_staleness + 1)
        for group in groups:
            ages[step - 1 - self.began.pop(group)] += self.setting.samples_per_group
        self.stale.append(ages)
        tokens = sum(self.tokens.pop(group) for group in groups)
        devices = self.setting.devices if self.setting.shared else self.setting.train_devices
        tokens_per_s = self.rates.train_tokens_per_s
        if self.setting.max_staleness:
            tokens_per_s /= self.rates.stale_work
        seconds = self.vary(self.rates.update_variation) * tokens / (devices * tokens_per_s)
        if self.setting.shared:
            seconds += self.rates.switch_s
        elif self.setting.max_staleness:
            seconds += self.rates.sending_s
        self.training = _Training(step=step, left_s=seconds, since=self.now)
        self.trained_s.append(self.now)
        self.clock.plan(self.now + seconds * self.slowdown, _Kind.UPDATED, step)

    def updated(self, step: int, stamp: int) -> None:
        if self.training is None or (step, stamp) != (self.training.step, self.training.stamp):
            return
        self.training = None
        self.trained_s[-1] = self.now - self.trained_s[-1]
        self.ends.append(self.now)
        self.tell(Updated(step))

    def share_cores(self) -> None:
        """If all processors are busy with devices, these give time to the controller: its need per step, spread over
        the previous step."""
        working = sum(bool(replica.heap) for replica in self.replicas) if not self.paused else 0
        busy = working * self.rates.devices_per_replica
        if self.training is not None:
            busy += self.setting.devices if self.setting.shared else self.setting.train_devices
        slowdown = 1.0
        if busy >= self.rates.cores and len(self.ends) > 1:
            taken = self.rates.controller_s / (self.ends[-1] - self.ends[-2]) / busy
            slowdown = 1.0 / (1.0 - min(taken, 0.5))
        if slowdown == self.slowdown:
            return
        before, self.slowdown = self.slowdown, slowdown
        for at, replica in enumerate(self.replicas):
            replica.advance(self.now, paused=self.paused)
            replica.slowdown = slowdown
            self.replan(at)
        if self.training is not None:
            training = self.training
            training.left_s -= (self.now - training.since) / before
            training.since, training.stamp = self.now, training.stamp + 1
            end = self.now + max(training.left_s, 0.0) * slowdown
            self.clock.plan(end, _Kind.UPDATED, training.step, training.stamp)

    def publish(self, step: int) -> None:
        """Replicas stop decoding; running samples are prepared for the new weights."""
        seconds = self.rates.overlapped_sync_s if self.setting.max_staleness else self.rates.sync_s
        if self.setting.partial:
            for replica in self.replicas:
                replica.advance(self.now, paused=self.paused)
            seconds += max(replica.recompute_s() for replica in self.replicas)
        self.paused = True
        for replica in self.replicas:
            replica.stamp += 1
        self.clock.plan(self.now + seconds, _Kind.PUBLISHED, step)

    def resume(self, step: int) -> None:
        for replica in self.replicas:
            replica.advance(self.now, paused=True)
        self.paused, self.served = False, step
        for at in range(len(self.replicas)):
            self.replan(at)
        self.tell(Published(step))


def simulate(setting: Setting, rates: Rates, lengths: Sequence[int], *, steps: int) -> Simulated:
    """Simulates a setting and measures this many steps, without those at the beginning and the end."""
    edges = 2 * (setting.max_staleness + 1) if setting.max_staleness else 0
    return Simulation(setting, rates, lengths, steps=steps + edges + 1).run()
