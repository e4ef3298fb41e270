"""The client: every sample once, from whichever replica; work where there is room; losses made good."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from fakes import FakeReplica, SilentReplica, tokens_of
from hypothesis import given
from hypothesis import strategies as st

from rlsdk.interfaces import DeadlineError, GenerationOutput, GenerationRequest, SamplingParams, WorkerError
from rlsdk.rollouts import GenerationClient


def request(name: int, n: int = 1) -> GenerationRequest:
    return GenerationRequest(
        request_id=str(name), prompt_ids=(name + 1,), sampling=SamplingParams(max_tokens=8, seed=name), n=n
    )


async def run_all(
    replicas: Sequence[FakeReplica], requests: Sequence[GenerationRequest], progress_s: float = 60.0
) -> dict[tuple[str, int], GenerationOutput]:
    """Every sample by its request's first name and index."""
    client = GenerationClient(replicas, progress_s=progress_s)
    running = asyncio.create_task(client.run())
    try:
        futures = {r.request_id: client.generate(r, priority=int(r.request_id)) for r in requests}
        return {(name, index): await future for name, found in futures.items() for index, future in found.items()}
    finally:
        running.cancel()


@given(
    counts=st.lists(st.integers(1, 5), min_size=1, max_size=12),
    delays=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    slots=st.integers(1, 6),
)
def test_every_sample_comes_once_and_is_its_own(counts: list[int], delays: list[int], slots: int) -> None:
    replicas = [FakeReplica(str(at), delay=delay, max_running=slots) for at, delay in enumerate(delays)]
    requests = [request(at, n) for at, n in enumerate(counts)]
    found = asyncio.run(run_all(replicas, requests))
    assert found.keys() == {(str(at), index) for at, n in enumerate(counts) for index in range(n)}
    for (name, index), output in found.items():
        assert output.token_ids.tolist() == tokens_of(requests[int(name)], index)


def test_one_replica_gets_everything_in_one_message_and_in_order() -> None:
    """So that its engine sees the batch that it would have seen in one call."""
    replica = FakeReplica(max_running=2)
    asyncio.run(run_all([replica], [request(at, 2) for at in range(20)]))
    assert replica.messages == 1
    assert [int(r.request_id) for r in replica.requests] == list(range(20))


def test_a_request_waits_for_a_free_slot_so_that_no_replica_idles_while_another_has_a_queue() -> None:
    slow, quick = FakeReplica("slow", delay=50, max_running=2), FakeReplica("quick", delay=1, max_running=2)
    asyncio.run(run_all([slow, quick], [request(at) for at in range(40)]))
    assert slow.most <= 2
    assert quick.most <= 2
    assert len(slow.requests) < 8
    assert len(slow.requests) + len(quick.requests) == 40


def test_work_goes_to_the_replica_with_the_least_outstanding_tokens() -> None:
    first, second = FakeReplica("a", max_running=100), FakeReplica("b", max_running=100)
    asyncio.run(run_all([first, second], [request(0, 9), *(request(at) for at in range(1, 10))]))
    assert [int(r.request_id) for r in first.requests] == [0]
    assert [int(r.request_id) for r in second.requests] == list(range(1, 10))


@given(dies_after=st.integers(0, 10), counts=st.lists(st.integers(1, 4), min_size=1, max_size=8))
def test_what_a_dead_replica_had_is_made_elsewhere_token_for_token(dies_after: int, counts: list[int]) -> None:
    requests = [request(at, n) for at, n in enumerate(counts)]
    replicas = [FakeReplica("dies", dies_after=dies_after), FakeReplica("lives")]
    found = asyncio.run(run_all(replicas, requests))
    assert {key: output.token_ids.tolist() for key, output in found.items()} == {
        (str(at), index): tokens_of(requests[at], index) for at, n in enumerate(counts) for index in range(n)
    }


def test_without_a_replica_left_the_error_is_the_last_replicas_own() -> None:
    with pytest.raises(WorkerError, match="is gone"):
        asyncio.run(run_all([FakeReplica(dies_after=1), FakeReplica(dies_after=0)], [request(0, 8)]))


def test_a_replica_that_makes_no_progress_is_given_up_by_the_deadline_of_progress() -> None:
    lives = FakeReplica("lives")
    asyncio.run(run_all([SilentReplica("silent"), lives], [request(at) for at in range(6)], progress_s=0.05))
    assert {r.request_id.partition("~")[0] for r in lives.requests} == {str(at) for at in range(6)}
    with pytest.raises(DeadlineError, match=r"silent has 1 samples to make and decoded no token for 0\.05 s"):
        asyncio.run(run_all([SilentReplica("silent")], [request(0)], progress_s=0.05))
