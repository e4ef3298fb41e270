"""The law of the schedule, under every order of events."""

from __future__ import annotations

from collections import deque
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsdk.rollouts import Finished, Publish, Published, Schedule, Start, Train, Updated


@given(
    groups=st.integers(1, 4),
    steps=st.integers(0, 6),
    staleness=st.integers(0, 3),
    done=st.integers(0, 6),
    random=st.randoms(use_true_random=False),
)
@settings(deadline=None)
def test_every_group_is_trained_once_in_order_and_none_starts_before_the_law_admits_it(
    groups: int, steps: int, staleness: int, done: int, random: Random
) -> None:
    schedule = Schedule(
        groups_per_step=groups, last_step=steps, done=done, next_group=done * groups, max_staleness=staleness
    )
    served, trained, under_way, possible = -1, done, [], list(schedule.begin())
    finished: set[int] = set()
    seen: list[int] = []
    updating: int | None = None
    while possible or under_way or updating is not None:
        choices = [*(["command"] if possible else []), *(["finish"] if under_way else [])]
        choices += ["update"] if updating is not None else []
        match random.choice(choices):
            case "command":
                match possible.pop(0):
                    case Publish(step):
                        assert step == trained
                        served = step
                        possible += schedule.handle(Published(step))
                    case Start(step, ordinals):
                        assert step - 1 - staleness <= served
                        assert ordinals == range((step - 1) * groups, step * groups)
                        under_way += ordinals
                    case Train(step, ordinals):
                        assert step == trained + 1
                        assert set(ordinals) <= finished
                        assert updating is None
                        seen += ordinals
                        updating = step
            case "finish":
                group = under_way.pop(random.randrange(len(under_way)))
                finished.add(group)
                possible += schedule.handle(Finished(group))
            case "update":
                trained, updating = updating, None
                possible += schedule.handle(Updated(trained))
    assert seen == list(range(done * groups, max(steps, done) * groups))


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
                assert ordinals.start == ordinal
                ordinal = ordinals.stop
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


def test_a_driver_that_answers_out_of_turn_is_told() -> None:
    schedule = Schedule(groups_per_step=1, last_step=2)
    schedule.begin()
    with pytest.raises(ValueError, match="cannot come now"):
        schedule.handle(Finished(0))
    with pytest.raises(ValueError, match="cannot come now"):
        schedule.handle(Updated(1))
