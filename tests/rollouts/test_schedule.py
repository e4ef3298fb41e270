"""The law of the schedule, under every order of events."""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsdk.rollouts import Finished, Publish, Published, Sampled, Schedule, Snapshot, Start, Train, Updated
from rlsdk.rollouts.schedule.events import Event


class Driver:
    """Carries commands out in any order that a real one may, and holds every event against the law."""

    def __init__(self, schedule: Schedule, random: Random, *, groups: int, staleness: int, drains: bool, done: int):
        self.schedule, self.random = schedule, random
        self.by_version = schedule.limits.by_version
        self.groups, self.staleness, self.drains = groups, staleness, drains
        self.served, self.trained, self.held = -1, done, done
        self.commands = deque(schedule.begin())
        self.running: dict[int, int] = {}
        """Ordinal -> the weights that were served when it began."""
        self.graded: dict[int, int] = {}
        """The same of groups that are sampled, whose grades are on their way."""
        self.made: dict[int, int] = {}
        self.began: dict[int, int] = {}
        self.publishing: int | None = None
        self.updating: int | None = None
        self.seen: list[tuple[int, ...]] = []
        self.steps: dict[int, int] = {}

    def step_of(self, group: int) -> int:
        return self.steps[group]

    def run(self, rejects: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        while self.commands or self.running or self.graded or self.updating is not None or self.publishing is not None:
            self.turn(rejects)

    def turn(self, rejects: set[int]) -> None:
        """One event, drawn from those that may come now."""
        choices = [*(["command"] if self.commands else []), *(["finish", "sample"] if self.running else [])]
        choices += ["grade"] if self.graded else []
        choices += ["update"] if self.updating is not None else []
        choices += ["publish"] if self.publishing is not None else []
        match self.random.choice(choices):
            case "command":
                self.carry_out()
            case "finish":  # a driver that does not tell what is sampled
                self.finish(self.running, rejects)
            case "sample":
                group = self.random.choice(sorted(self.running))
                self.graded[group] = self.running.pop(group)
                self.tell(Sampled(group))
            case "grade":
                self.finish(self.graded, rejects)
            case "update":
                self.trained, self.updating = self.updating or 0, None
                self.tell(Updated(self.trained))
            case "publish":
                self.served, self.publishing = self.publishing or 0, None
                self.tell(Published(self.served))

    def finish(self, of: dict[int, int], rejects: set[int]) -> None:
        group = self.random.choice(sorted(of))
        self.made[group] = of.pop(group)
        self.tell(Finished(group, group not in rejects))

    def tell(self, event: Event) -> None:
        self.commands.extend(self.schedule.handle(event))
        if self.drains and self.schedule.settled:  # A checkpoint may be written: older groups could not be made again.
            assert all(served == self.served for served in self.graded.values())
            assert all(served == self.served for served in self.running.values())

    def carry_out(self) -> None:
        match self.commands.popleft():
            case Snapshot(step):
                assert step == self.trained
                assert self.updating is None
                self.held = step
            case Publish(step):
                # The weights were kept aside, or nothing has changed them since.
                assert step == self.held or (step == self.trained and self.updating is None)
                assert self.publishing is None
                assert step > self.served
                if self.by_version:  # What samples stays among the newest that replicas keep.
                    assert all(version >= step - self.staleness for version in self.running.values())
                else:
                    assert not (self.drains and self.running)
                self.publishing = self.held = step
            case Start(step, ordinals, weights):
                assert not set(ordinals) & self.began.keys()
                assert step - 1 - self.staleness <= self.served
                assert (weights is not None) == self.by_version
                version = self.served if weights is None else weights
                assert self.served - self.staleness <= version <= self.served
                # What shares a version begins one step after the other: nothing in a batch depends on time.
                assert not self.by_version or not [
                    g for g, v in self.running.items() if v == version and self.step_of(g) != step
                ]
                self.running |= dict.fromkeys(ordinals, version)
                self.began |= dict.fromkeys(ordinals, version)
                self.steps |= dict.fromkeys(ordinals, step)
            case Train(step, ordinals):
                assert step == self.trained + 1
                assert self.updating is None
                # Nothing older than the bound, however slow it was.
                assert min(self.made.pop(ordinal) for ordinal in ordinals) >= step - 1 - self.staleness
                assert len(ordinals) == self.groups
                assert self.publishing is None or self.publishing == self.held
                self.seen.append(ordinals)
                self.updating = step


KINDS = [("prompt", True, False), ("prompt", True, True), ("prompt", False, False), ("finish", False, False)]


@pytest.mark.parametrize(("order", "drains", "by_version"), KINDS)
@given(
    groups=st.integers(1, 4),
    steps=st.integers(0, 6),
    staleness=st.integers(0, 3),
    done=st.integers(0, 6),
    random=st.randoms(use_true_random=False),
)
@settings(deadline=None)
def test_every_group_is_trained_once_and_nothing_older_than_the_bound(
    order: Any, drains: bool, by_version: bool, groups: int, steps: int, staleness: int, done: int, random: Random
) -> None:
    first = done * groups
    schedule = Schedule(
        groups_per_step=groups, last_step=steps, done=done, next_group=first, max_staleness=staleness, order=order,
        drains=drains, by_version=by_version,
    )  # fmt: skip
    driver = Driver(schedule, random, groups=groups, staleness=staleness, drains=drains, done=done)
    driver.run()
    assert sorted(group for ordinals in driver.seen for group in ordinals) == list(
        range(first, max(steps, done) * groups)
    )
    if order == "prompt":
        assert driver.seen == [tuple(range(at * groups, (at + 1) * groups)) for at in range(done, max(steps, done))]
    if drains:  # Which weights began a group is a matter of its step, whatever happened when.
        expected = {g: max(done, g // groups - staleness) for g in range(first, max(steps, done) * groups)}
        assert driver.began == expected


@pytest.mark.parametrize(("order", "drains", "by_version"), KINDS)
@given(
    groups=st.integers(1, 3),
    staleness=st.integers(0, 3),
    bad=st.sets(st.integers(0, 30)),
    random=st.randoms(use_true_random=False),
)
@settings(deadline=None)
def test_groups_that_are_refused_are_replaced_and_the_bound_still_holds(
    order: Any, drains: bool, by_version: bool, groups: int, staleness: int, bad: set[int], random: Random
) -> None:
    schedule = Schedule(
        groups_per_step=groups, last_step=4, max_staleness=staleness, order=order, drains=drains,
        by_version=by_version, max_groups_per_step=3 * groups,
    )  # fmt: skip
    driver = Driver(schedule, random, groups=groups, staleness=staleness, drains=drains, done=0)
    driver.run(bad)
    assert len(driver.seen) == 4
    trained = [group for ordinals in driver.seen for group in ordinals]
    assert len(set(trained)) == len(trained) == 4 * groups


@pytest.mark.parametrize(("order", "drains", "by_version"), KINDS)
@given(
    groups=st.integers(1, 3),
    staleness=st.integers(1, 3),
    events=st.integers(0, 60),
    random=st.randoms(use_true_random=False),
)
@settings(deadline=None)
def test_a_restart_makes_what_was_open_again_and_loses_nothing(
    order: Any, drains: bool, by_version: bool, groups: int, staleness: int, events: int, random: Random
) -> None:
    def machine(done: int, next_group: int, again: dict[int, list[int]]) -> Schedule:
        return Schedule(
            groups_per_step=groups, last_step=5, done=done, next_group=next_group, max_staleness=staleness,
            order=order, drains=drains, by_version=by_version, again=again,
        )  # fmt: skip

    driver = Driver(machine(0, 0, {}), random, groups=groups, staleness=staleness, drains=drains, done=0)
    for _ in range(events):
        if (
            driver.commands
            or driver.running
            or driver.graded
            or driver.updating is not None
            or driver.publishing is not None
        ):
            driver.turn(set())
    # What a checkpoint behind the last update knows: trained groups, and the bound of all others that were begun.
    done = driver.trained
    trained = [group for ordinals in driver.seen[:done] for group in ordinals]
    waiting = [c for c in driver.commands if isinstance(c, Start)]
    next_group = driver.schedule.next_group - sum(len(c.groups) for c in waiting)
    due = {group: min(version + 1 + staleness, 5) for group, version in driver.began.items()}
    if order == "prompt":
        due = {group: group // groups + 1 for group in driver.began}
    again: dict[int, list[int]] = {}
    for group in sorted(set(driver.began) - set(trained)):
        again.setdefault(due[group], []).append(group)
    rest = Driver(
        machine(done, next_group, again), random, groups=groups, staleness=staleness, drains=drains, done=done
    )
    rest.run()
    seen = [*trained, *(group for ordinals in rest.seen for group in ordinals)]
    assert sorted(seen) == list(range(5 * groups))


@given(
    groups=st.integers(1, 4),
    steps=st.integers(1, 6),
    staleness=st.integers(0, 4),
    random=st.randoms(use_true_random=False),
)
@settings(deadline=None)
def test_in_the_order_of_finishing_the_law_is_areals_admission(
    groups: int, steps: int, staleness: int, random: Random
) -> None:
    """AReaL (arXiv 2505.24298, section 4.2) submits a request while floor((N - 1) / B) <= i + eta: N requests with this
    one, B a step, i the version that is served, eta the bound. Counted in groups, these are the ones that are started,
    whatever happens when: as soon as they may, and no sooner."""
    schedule = Schedule(groups_per_step=groups, last_step=steps, max_staleness=staleness, order="finish", drains=False)
    driver = Driver(schedule, random, groups=groups, staleness=staleness, drains=False, done=0)
    submitted, version = 0, -1
    while (
        driver.commands
        or driver.running
        or driver.graded
        or driver.updating is not None
        or driver.publishing is not None
    ):
        driver.turn(set())
        if any(isinstance(command, Start) for command in driver.commands):
            continue  # allowed, and on its way to the replicas
        version = max(version, driver.served)
        while version >= 0 and submitted < steps * groups and (submitted + 1 - 1) // groups <= version + staleness:
            submitted += 1
        assert len(driver.began) == submitted
    assert submitted == steps * groups


def test_one_group_that_takes_fifty_times_as_long_holds_up_no_step_before_its_bound() -> None:
    schedule = Schedule(groups_per_step=2, last_step=6, max_staleness=2, order="finish", drains=False)
    commands, running, trained, slow = deque(schedule.begin()), list[int](), list[tuple[int, ...]](), 0
    for turn in range(500):
        while commands:
            match commands.popleft():
                case Publish(step):
                    commands.extend(schedule.handle(Published(step)))
                case Start(_, ordinals):
                    running += ordinals
                case Train(step, ordinals):
                    trained.append(ordinals)
                    commands.extend(schedule.handle(Updated(step)))
        quick = [group for group in running if group != slow]
        if quick and (turn < 50 or slow not in running):
            running.remove(quick[0])
            commands.extend(schedule.handle(Finished(quick[0])))
        elif slow in running and (turn >= 50 or not quick):
            if not quick and turn < 50:
                assert len(trained) == 2  # Steps 1 and 2 went without it; its bound is step 3, and that one waits.
            running.remove(slow)
            commands.extend(schedule.handle(Finished(slow)))
    assert [slow in ordinals for ordinals in trained] == [False, False, True, False, False, False]


@settings(deadline=None)
@given(
    groups=st.integers(1, 4),
    most=st.integers(1, 12),
    bad=st.sets(st.integers(0, 40)),
    random=st.randoms(use_true_random=False),
)
def test_a_step_refills_what_is_not_accepted_up_to_its_bound_whatever_the_order(
    groups: int, most: int, bad: set[int], random: Random
) -> None:
    schedule = Schedule(groups_per_step=groups, last_step=3, max_groups_per_step=most)
    commands, under_way, ordinal = deque(schedule.begin()), list[int](), 0
    trained: list[tuple[int, ...]] = []
    while commands or under_way:
        if not commands:
            group = under_way.pop(random.randrange(len(under_way)))
            commands.extend(schedule.handle(Finished(group, group not in bad)))
            continue
        match commands.popleft():
            case Publish(step):
                commands.extend(schedule.handle(Published(step)))
            case Start(_, ordinals):
                assert ordinals[0] == ordinal
                ordinal = ordinals[-1] + 1
                under_way += ordinals
            case Train(step, ordinals):
                trained.append(ordinals)
                commands.extend(schedule.handle(Updated(step)))
    start = 0
    for ordinals in trained:
        # The law, said again: ordinals in order, until enough are good or the bound is reached.
        made, good = [], []
        while len(made) < groups or (len(good) < groups and len(made) < max(groups, most)):
            made.append(start + len(made))
            good = [at for at in made if at not in bad]
        spare = [at for at in made if at in bad][: groups - len(good)]
        assert ordinals == tuple(sorted([*good[:groups], *spare]))
        start += len(made)
    assert len(trained) == 3


def test_the_synchronous_run_is_publish_start_train() -> None:
    schedule = Schedule(groups_per_step=2, last_step=2)
    assert schedule.begin() == [Publish(0)]
    assert schedule.handle(Published(0)) == [Start(1, range(2))]
    assert schedule.handle(Finished(1)) == []
    assert schedule.handle(Finished(0)) == [Train(1, (0, 1))]
    assert schedule.handle(Updated(1)) == [Publish(1)]
    assert schedule.handle(Published(1)) == [Start(2, range(2, 4))]


def test_grades_on_their_way_hold_up_neither_the_next_groups_nor_weights_but_a_checkpoint() -> None:
    schedule = Schedule(groups_per_step=1, last_step=4, max_staleness=1)
    assert schedule.begin() == [Publish(0)]
    assert schedule.handle(Published(0)) == [Start(1, range(1))]
    assert schedule.handle(Sampled(0)) == [Start(2, range(1, 2))]
    assert schedule.handle(Finished(0)) == [Train(1, (0,))]
    assert schedule.handle(Sampled(1)) == []
    assert schedule.handle(Updated(1)) == [Snapshot(1), Publish(1)]
    assert schedule.handle(Published(1)) == [Start(3, range(2, 3))]
    assert (schedule.serves_newest, schedule.settled) == (True, False)
    assert schedule.handle(Finished(1)) == [Train(2, (1,))]
    assert schedule.settled


def test_where_groups_may_be_replaced_the_weights_wait_for_grades() -> None:
    schedule = Schedule(groups_per_step=1, last_step=4, max_staleness=1, max_groups_per_step=2)
    schedule.begin()
    schedule.handle(Published(0))
    assert schedule.handle(Sampled(0)) == []
    assert schedule.handle(Finished(0, accepted=False)) == [Start(1, range(1, 2))]
    assert schedule.handle(Finished(1)) == [Start(2, range(2, 3)), Train(1, (1,))]


def test_a_driver_that_answers_out_of_turn_is_told() -> None:
    schedule = Schedule(groups_per_step=1, last_step=2)
    schedule.begin()
    with pytest.raises(ValueError, match="cannot come now"):
        schedule.handle(Finished(0))
    with pytest.raises(ValueError, match="cannot come now"):
        schedule.handle(Sampled(0))
    with pytest.raises(ValueError, match="cannot come now"):
        schedule.handle(Updated(1))
