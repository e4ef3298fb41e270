"""Waiting for many answers, on real workers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import ray

from rlsdk.cluster import WorkerGroup
from rlsdk.cluster.calls.messages import Call
from rlsdk.cluster.calls.pending import Pending, Request
from rlsdk.interfaces import BatchError, DeadlineError

CALLS = 300


def requests_of(group: WorkerGroup, method: str, count: int, *args: Any) -> list[Request]:
    """Calls that their workers answer one after another."""
    found = []
    for at in range(count):
        member = group.members[at % len(group.members)]
        call = Call(role=member.ctx.role, method=method, args=args, kwargs={})
        found.append(Request(ref=member.worker.call(call, concurrent=False), worker=member.worker, role="x", rank=at))
    return found


def test_waiting_looks_at_each_answer_a_few_times_however_many_there_are(
    group: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []
    wait, get = ray.wait, ray.get
    fetches: list[int] = []

    def counted_wait(refs: Any, **options: Any) -> Any:
        looked.append(len(refs))
        return wait(refs, **options)

    def counted_get(refs: Any, **options: Any) -> Any:
        fetches.append(1)
        return get(refs, **options)

    monkeypatch.setattr(ray, "wait", counted_wait)
    monkeypatch.setattr(ray, "get", counted_get)
    waiting = Pending(requests_of(group, "sleepy", CALLS, 0.005), doing="sleeping", join=dict, timeout_s=60)
    answers = waiting.result()
    assert sorted(answers) == list(range(CALLS))
    assert sum(looked) < 20 * CALLS, "not all that is out, once for each that comes in"
    assert len(fetches) < CALLS / 4, "what is there is read at once"


def test_a_rank_that_fails_ends_the_wait_for_the_others_soon(make_group: Callable[..., WorkerGroup]) -> None:
    group = make_group("FragileHost")
    fails, others = requests_of(group, "raise_ours", 1), requests_of(group, "wait_for_release", 4)[1:]
    waiting = Pending([*fails, *others], doing="failing", join=dict, timeout_s=60)
    with pytest.raises(BatchError, match="rank 0 does not like"):
        waiting.result()
    assert not ray.wait([request.ref for request in others], timeout=0)[0]
    group.run("let_go")


def test_a_deadline_runs_from_the_last_sign_of_progress(make_group: Callable[..., WorkerGroup]) -> None:
    """Work of four pieces, each shorter than the deadline, all together longer; then a piece that never ends."""
    group = make_group("FragileHost")
    assert group.run("work_in_pieces", 4, 0.8, timeout_s=2.5) == [0, 1, 2, 3]
    start = time.monotonic()
    with pytest.raises(DeadlineError, match=r"no answer within 1 s .*, and no progress.*deadlines"):
        group.run("work_in_pieces", 1, 8.0, timeout_s=1.0)
    assert time.monotonic() - start < 7


def test_one_rank_that_makes_progress_is_waited_for_and_one_that_hangs_behind_it_is_not(
    make_group: Callable[..., WorkerGroup],
) -> None:
    group = make_group("FragileHost")
    with pytest.raises(DeadlineError, match="from x rank 1 "):
        Pending(
            [
                *requests_of(group, "work_in_pieces", 1, 5, 0.8),
                *[replace(request, rank=1) for request in requests_of(group, "hang_on", 2, 1, 10.0)[1:]],
            ],
            doing="working",
            join=dict,
            timeout_s=2.5,
        ).result()
