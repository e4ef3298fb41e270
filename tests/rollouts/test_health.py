"""What was lost serves again by a completed sync of a new process, and by nothing else; clients go by that."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from fakes import FakeReplica, SilentReplica, tokens_of
from hypothesis import given
from hypothesis import strategies as st
from test_client import request

from rlsdk.interfaces import GenerationOutput, GenerationRequest, WorkerError
from rlsdk.rollouts import GenerationClient
from rlsdk.rollouts.client.health import Event, Health, State, after

SERVES = (State.HEALTHY, State.SUSPECT)


@given(st.lists(st.sampled_from(Event), max_size=60))
def test_there_is_no_way_from_lost_to_healthy_but_a_new_process_and_its_sync(events: Sequence[Event]) -> None:
    health, since_lost = Health(), None
    for event in events:
        before = health.state
        try:
            now = health.handle(event)
        except ValueError:
            assert health.state is before  # refused: nothing happened
            continue
        if now is State.LOST:
            since_lost = []
        elif since_lost is not None and now is not before:
            since_lost.append(event)
        if now in SERVES and since_lost is not None:
            assert since_lost == [Event.RESTART, Event.STARTED, Event.SYNCED]
            since_lost = None
        if before is State.RETIRED:
            assert now is State.RETIRED
    assert health.life >= health.in_a_row


@given(st.lists(st.sampled_from(Event), max_size=60), st.lists(st.booleans(), min_size=60, max_size=60))
def test_what_an_earlier_process_is_heard_of_changes_nothing(events: Sequence[Event], old: Sequence[bool]) -> None:
    health = Health()
    for event, is_old in zip(events, old, strict=False):
        before = health.state, health.life, health.in_a_row
        if is_old:
            health.handle(event, health.life - 1)
            assert (health.state, health.life, health.in_a_row) == before
        elif (health.state, event) != (State.RETIRED, Event.SYNCED):
            try:
                health.handle(event, health.life)
            except ValueError:
                assert (health.state, health.life, health.in_a_row) == before


def test_an_event_that_cannot_come_is_a_drivers_mistake() -> None:
    with pytest.raises(ValueError, match="synced cannot come while a replica is lost"):
        after(State.LOST, Event.SYNCED)


class Reviving:
    """Satisfies `Restarts`: a new process is a replica that does not die any more."""

    def __init__(self, replicas: Sequence[FakeReplica], *, max_restarts: int = 3, turns: int = 5) -> None:
        self.health = [Health() for _ in replicas]
        self.replicas = replicas
        self.max_restarts = max_restarts
        self.turns = turns
        self.revived: list[int] = []

    async def revive(self, at: int, life: int, error: BaseException) -> None:
        health = self.health[at]
        assert (health.state, health.life) == (State.LOST, life)
        if health.in_a_row >= self.max_restarts:
            health.handle(Event.GIVEN_UP)
            raise WorkerError("faults.replica_restarts") from error
        for event in (Event.RESTART, Event.STARTED):
            health.handle(event)
            for _ in range(self.turns):
                await asyncio.sleep(0)
        self.replicas[at].waiting.clear()
        if self.replicas[at].name != "dies always":
            self.replicas[at].dies_after = None
        self.revived.append(at)
        health.handle(Event.SYNCED)


async def run_all(
    replicas: Sequence[FakeReplica], requests: Sequence[GenerationRequest], restarts: Reviving, progress_s: float = 60.0
) -> dict[tuple[str, int], GenerationOutput]:
    client = GenerationClient(replicas, progress_s=progress_s, restarts=restarts, max_attempts=10)
    running = asyncio.create_task(client.run())
    try:
        futures = {r.request_id: client.generate(r, priority=int(r.request_id)) for r in requests}
        return {(name, index): await future for name, found in futures.items() for index, future in found.items()}
    finally:
        running.cancel()


@given(
    dies_after=st.lists(st.none() | st.integers(0, 12), min_size=1, max_size=4),
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=10),
)
def test_whichever_replicas_die_all_of_them_too_each_sample_is_made_and_is_its_own(
    dies_after: list[int | None], counts: list[int]
) -> None:
    requests = [request(at, n) for at, n in enumerate(counts)]
    replicas = [FakeReplica(str(at), dies_after=after) for at, after in enumerate(dies_after)]
    restarts = Reviving(replicas)
    found = asyncio.run(asyncio.wait_for(run_all(replicas, requests, restarts), 30))
    assert {key: output.token_ids.tolist() for key, output in found.items()} == {
        (str(at), index): tokens_of(requests[at], index) for at, n in enumerate(counts) for index in range(n)
    }


def test_one_that_is_back_takes_work_again() -> None:
    replicas = [FakeReplica("slow", delay=40, max_running=1), FakeReplica("dies", dies_after=2, max_running=1)]
    restarts = Reviving(replicas)
    asyncio.run(run_all(replicas, [request(at) for at in range(30)], restarts))
    assert restarts.revived == [1]
    assert replicas[1].done > 12


def test_one_that_dies_whenever_it_comes_back_is_given_up_by_the_limit_in_the_end() -> None:
    replicas = [FakeReplica("dies always", dies_after=0)]
    with pytest.raises(WorkerError, match=r"faults\.replica_restarts"):
        asyncio.run(run_all(replicas, [request(0)], Reviving(replicas, max_restarts=2)))


class LostInASync(Reviving):
    """The first replica is given up while it has nothing to make: nobody asks it for anything."""

    async def revive(self, at: int, life: int, error: BaseException) -> None:
        if self.health[at].state is State.RETIRED:
            raise WorkerError("the first of the two is given up")
        await super().revive(at, life, error)


def test_where_the_last_is_given_up_while_it_is_idle_requests_hear_of_it() -> None:
    """They waited for good: the replica had died in a sync, its restarts in vain, and it had no request to fail."""
    replicas = [FakeReplica("0"), FakeReplica("dies always", dies_after=0)]
    restarts = LostInASync(replicas, max_restarts=1)
    restarts.health[0].handle(Event.FAILED)

    async def retired_later() -> None:
        running = asyncio.create_task(run_all(replicas, [request(0)], restarts))
        while restarts.health[1].state is not State.RETIRED:
            await asyncio.sleep(0.01)
        restarts.health[0].handle(Event.GIVEN_UP)
        await asyncio.wait_for(running, 20)

    with pytest.raises(WorkerError, match=r"given up|replica_restarts"):
        asyncio.run(retired_later())


class DeafReplica(FakeReplica):
    """Does not even answer that it has nothing, until it is made anew."""

    async def collect(self, wait_s: float):  # type: ignore[no-untyped-def]
        if self.dies_after is not None:
            await asyncio.sleep(3600)
        return await super().collect(wait_s)


def test_one_that_does_not_answer_at_all_is_lost_by_the_deadline_of_progress() -> None:
    """It used to be waited for without end."""
    replicas = [DeafReplica("deaf", dies_after=99)]
    restarts = Reviving(replicas)
    found = asyncio.run(asyncio.wait_for(run_all(replicas, [request(0, 3)], restarts, progress_s=0.3), 30))
    assert len(found) == 3
    assert restarts.revived == [0]


def test_one_that_is_late_gets_nothing_new_and_is_no_suspect_any_more_when_it_answers() -> None:
    class Late(SilentReplica):
        async def collect(self, wait_s: float):  # type: ignore[no-untyped-def]
            return await (FakeReplica.collect(self, wait_s) if awake.is_set() else super().collect(wait_s))

    awake = asyncio.Event()
    replicas = [Late("late", max_running=1), FakeReplica("quick", delay=200)]
    restarts = Reviving(replicas)

    async def main() -> None:
        client = GenerationClient(replicas, progress_s=8.0, restarts=restarts)
        running = asyncio.create_task(client.run())
        first = client.generate(request(0))[0]
        while restarts.health[0].state is not State.SUSPECT:
            await asyncio.sleep(0.01)
        rest = [client.generate(request(at))[0] for at in range(1, 7)]
        await asyncio.gather(*rest)
        assert len(replicas[0].requests) == 1
        awake.set()
        await first
        assert restarts.health[0].state is State.HEALTHY
        running.cancel()

    asyncio.run(asyncio.wait_for(main(), 30))
    assert restarts.revived == []
