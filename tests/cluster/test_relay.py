"""Calls that reach the ranks of a node through one of them: the same answers, order, errors and deadlines."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import ray
import torch

from rlsdk.cluster import Cluster, WorkerGroup
from rlsdk.cluster.batches.batch_ref import StoredRows
from rlsdk.cluster.calls import relay
from rlsdk.cluster.calls.messages import Call, Failure
from rlsdk.cluster.calls.relay import UNANSWERED, Relayed, Relays, StoredAgain, pass_on
from rlsdk.interfaces import Batch, BatchError, DeadlineError, WorkerError

MakeGroup = Callable[..., WorkerGroup]
StartCluster = Callable[[int], Cluster]


@pytest.fixture(autouse=True)
def _few_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "RELAY_RANKS", 2)


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ranks of each message that was relayed."""
    found: list[int] = []
    send = Relays.send

    def counted(self: Relays, workers: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(len(workers))
        return send(self, workers, *args, **kwargs)

    monkeypatch.setattr(Relays, "send", counted)
    return found


def rows(count: int) -> Batch:
    return Batch(
        lengths=torch.full((count,), 2),
        tokens={"input_ids": torch.arange(2 * count)},
        rows={"row_id": torch.arange(count)},
    )


def test_a_node_gets_one_message_and_the_rows_come_back_in_order(make_group: MakeGroup, messages: list[int]) -> None:
    group = make_group(tp_size=2)
    for _ in range(2):  # the second finds workers that know one another
        out = group.run("double", rows(8))
        assert out["doubled"].tolist() == [2 * at for at in range(16)]
        assert set(out["by"].tolist()) == {0, 2}, "the collectors' answers, of four that were asked"
    assert messages == [4, 4]


def test_ranks_that_share_no_rows_get_messages_of_their_own(group: WorkerGroup, messages: list[int]) -> None:
    assert group.run("ranks", 1) == [1, 2, 3, 4]
    assert group.run_each("append", [(at,) for at in range(4)]) == [[at] for at in range(4)]
    assert group.run("race", [5.0, 5.0, 0.0, 5.0]) == 2
    assert messages == []


def test_calls_run_in_the_order_of_submission_whichever_way_they_went(make_group: MakeGroup) -> None:
    group, pending = make_group(), []
    for at in range(0, 40, 2):
        pending += [group.submit("append_data", rows(4), at), group.submit("append", at + 1)]
    assert [item.result(30) for item in pending][-1] == [list(range(40))] * 4


def test_threads_that_send_at_once_leave_no_gap(make_group: MakeGroup) -> None:
    groups = [make_group(), make_group()]
    found: list[Any] = []

    def send(group: WorkerGroup) -> None:
        for at in range(20):
            found.append(group.run("append_data", rows(4), at, timeout_s=30))

    threads = [threading.Thread(target=send, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(len(answer[0]) for answer in found) == sorted([*range(1, 21), *range(1, 21)])


def test_a_message_that_cannot_be_sent_uses_no_number_up(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = make_group()
    with monkeypatch.context() as patch:
        patch.setattr(relay, "Relayed", lambda *_: threading.Lock())  # what Ray cannot pickle
        with pytest.raises(TypeError):
            group.submit("append_data", rows(4), 1)
    assert group.run("append_data", rows(4), 2, timeout_s=20) == [[2]] * 4


def victim(start: StartCluster) -> WorkerGroup:
    """Two ranks whose processes have imported what a batch needs: deadlines are of what comes after."""
    group = start(2).create_group("victim", "cluster_hosts:FragileHost")
    assert group.run("data_hang_on", rows(4), 0, 0.0, timeout_s=120) == [0, 1]
    return group


def test_one_rank_that_raises_is_named_and_the_others_are_not_waited_for(own_cluster: StartCluster) -> None:
    group = victim(own_cluster)
    start = time.monotonic()
    with pytest.raises(BatchError, match="only me") as caught:
        group.run("data_raise_on", rows(4), 1)
    assert time.monotonic() - start < 40
    assert "raised by victim rank 1 on node" in caught.value.__notes__[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_worker_is_named_whether_it_relays_or_not(own_cluster: StartCluster, rank: int) -> None:
    group = victim(own_cluster)
    pids = group.run("pid")
    start = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        group.run("data_die", rows(4), rank)
    assert time.monotonic() - start < 40
    assert f"victim rank {rank} died on node {group.contexts[rank].node}, pid {pids[rank]} while" in str(caught.value)
    assert "  these are my last words" in str(caught.value)


def test_silent_ranks_are_named_and_the_call_goes_on(own_cluster: StartCluster) -> None:
    group = victim(own_cluster)
    pending = group.submit("data_hang_on", rows(4), 1, 4.0)
    with pytest.raises(DeadlineError, match=r"no answer within 1 s in victim\.data_hang_on from .*victim rank 1 "):
        pending.result(1.0)
    assert pending.result(60) == [0, 1]


def test_a_call_that_could_not_be_passed_on_is_a_failure_whatever_it_raised() -> None:
    """Never the place holder of an answer that was not waited for, which would pass for one."""
    never = asyncio.Event()

    async def send(one: Relayed) -> Any:
        if one.worker_id == "b":
            raise KeyError("b")
        await never.wait()

    calls = [Relayed(name, 1, Call(role="x", method="y", args=(), kwargs={})) for name in "abc"]
    found = asyncio.run(pass_on(calls, send))
    assert found[0] == found[2] == UNANSWERED
    assert isinstance(found[1], Failure)
    assert "KeyError: 'b'" in found[1].summary


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> dict[str, Batch]:
    """In place of Ray's store: the controller's batch of eight rows, and what this process adds."""
    held, numbers = {"controller's": rows(8)}, itertools.count(1)

    def put(batch: Batch) -> str:
        name = f"own {next(numbers)}"  # several threads put
        held[name] = batch
        return name

    monkeypatch.setattr(ray, "get", lambda refs: [held[ref] for ref in refs])
    monkeypatch.setattr(ray, "put", put)
    return held


def send_again(calls: list[Call]) -> list[Call]:
    """As one message brings them to the worker that relays."""

    async def send() -> list[Call]:
        again = StoredAgain()
        return await asyncio.gather(*(again.call(call) for call in calls))

    return asyncio.run(send())


def call_with(value: Any) -> Call:
    return Call(role="actor", method="forward", args=(value,), kwargs={"outputs": "x", "more": value})


PIECES = (("controller's", ("input_ids",)),)


def test_neighbours_read_rows_that_the_relaying_worker_owns_once_for_ranks_that_share_them(
    stored: dict[str, Batch],
) -> None:
    """Else each asks the controller where the rows are, and is counted by it: more work than the call itself."""
    first, second = (StoredRows(PIECES, rows, {"temperature": 0.5}, of_node=True) for rows in ((0, 3), (3, 8)))
    calls = send_again([call_with(first), call_with(first), call_with(second)])
    read = [call.args[0] for call in calls]
    [one], [same], [other] = ([ref for ref, _ in own.pieces] for own in read)
    assert one == same
    assert {one, other} == {"own 1", "own 2"}
    assert all(call.kwargs == {"outputs": "x", "more": call.args[0]} for call in calls)
    assert [own.load()["row_id"].tolist() for own in read] == [[0, 1, 2], [0, 1, 2], [3, 4, 5, 6, 7]]
    assert read[0].load().meta == {"temperature": 0.5}
    assert read[2].load()["input_ids"].tolist() == [*range(6, 16)]


def test_rows_of_a_batch_that_all_nodes_read_are_not_copied(stored: dict[str, Batch]) -> None:
    calls = [call_with(StoredRows(PIECES, rows)) for rows in (None, (0, 3), np.array([5, 1]))]
    assert send_again(calls) == calls
    assert list(stored) == ["controller's"]


def test_rows_that_cannot_be_stored_again_are_read_from_the_controller(
    stored: dict[str, Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that did not go out would leave a gap in its worker's numbers, behind which nothing runs any more."""

    def full(batch: Batch) -> str:
        raise ray.exceptions.ObjectStoreFullError("full")

    monkeypatch.setattr(ray, "put", full)
    call = call_with(StoredRows(PIECES, (0, 3), of_node=True))
    assert send_again([call]) == [call]
