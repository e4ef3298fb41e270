"""How long a pull waits: as long as something comes, and no longer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sharding_cases import random_tensors, rollout_group, train_group, whole_target

from rlsdk.interfaces import Box, Bucket, DeadlineError, WeightShard, WeightSyncError
from rlsdk.kit.ranks.progress import idle_s
from rlsdk.sharding import GenericShardingManager, WeightTarget
from rlsdk.sharding.transfer import worker_progress
from rlsdk.sharding.transfer.worker_progress import WorkerProgress, counted
from rlsdk.sharding.transports.ring_transport import RingTransport
from rlsdk.testing.sharding.local_groups import LocalPeer

SHAPES = {f"layer.{at}": (64, 16) for at in range(12)}
PAUSE_S = 0.2
TIMEOUT_S = 1.2
"""Of one wait; twelve pauses are twice as long."""
LATE_S = 30.0
"""What a busy machine may take."""


class SlowPeer(LocalPeer):
    """A source that takes its time over each call, and answers only `answers` of them."""

    answers = 1000

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        self.answers -= 1
        if self.answers < 0:
            time.sleep(timeout_s)
            raise DeadlineError(f"no answer in {timeout_s:g} s")
        time.sleep(PAUSE_S)
        return super().call(method, *args, timeout_s=timeout_s)


def groups(transport: str) -> tuple[WeightTarget, list[Bucket], SlowPeer, dict[str, torch.Tensor]]:
    tensors = random_tensors(SHAPES)
    source, wanted = whole_target(SHAPES, process="train"), whole_target(SHAPES)
    train, rollout = train_group(tensors, [source]), rollout_group([[wanted]])
    manager = GenericShardingManager(train, rollout, bucket_bytes=4096, transports=[transport])
    buckets = list(manager.plan([source], [wanted]).buckets)
    assert len(buckets) == len(SHAPES)
    return rollout.hosts[0].target, buckets, SlowPeer(train.hosts[0], is_local=False), tensors


def test_calls_that_are_answered_slowly_one_after_the_other_outlive_the_time_of_one() -> None:
    target, buckets, peer, _ = groups("object_store")
    start = time.monotonic()
    assert target.pull(buckets, {0: peer}, 1, TIMEOUT_S).version == 1
    assert time.monotonic() - start > TIMEOUT_S
    assert idle_s() < TIMEOUT_S


def test_a_stream_that_comes_slowly_outlives_the_time_of_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = RingTransport._fill
    monkeypatch.setattr(RingTransport, "_fill", lambda *args: (time.sleep(PAUSE_S), fill(*args)))
    target, buckets, peer, _ = groups("ring")
    start = time.monotonic()
    assert target.pull(buckets, {0: peer}, 1, TIMEOUT_S).version == 1
    assert time.monotonic() - start > TIMEOUT_S
    target.close()
    peer.host.source.close()


@pytest.mark.parametrize("come", [0, 4])
def test_calls_that_are_answered_no_more_end_the_pull_in_time(come: int) -> None:
    target, buckets, peer, _ = groups("object_store")
    peer.answers = come
    start = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"did not arrive .* DeadlineError: no answer in 1.2 s"):
        target.pull(buckets, {0: peer}, 1, TIMEOUT_S)
    assert time.monotonic() - start < come * PAUSE_S + TIMEOUT_S + LATE_S


def test_a_stream_that_stands_still_ends_the_pull_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    fill, filled, over = RingTransport._fill, [], threading.Event()

    def fill_four(*args: Any) -> None:
        filled.append(1)
        if len(filled) > 4:
            over.wait(120)
        fill(*args)

    monkeypatch.setattr(RingTransport, "_fill", fill_four)
    target, buckets, peer, _ = groups("ring")
    start = time.monotonic()
    try:
        with pytest.raises(WeightSyncError, match=r"the source sent nothing for 1.2 s"):
            target.pull(buckets, {0: peer}, 1, TIMEOUT_S)
        assert time.monotonic() - start < TIMEOUT_S + LATE_S
    finally:
        over.set()
        target.close()
        peer.host.source.close()


def shards() -> Iterator[WeightShard]:
    for name, shape in SHAPES.items():
        time.sleep(0.05)
        yield WeightShard(name=name, box=Box.whole(shape), tensor=torch.zeros(shape))


def test_what_comes_to_workers_is_progress_of_their_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_progress, "LOOK_S", 0.02)
    two = WorkerProgress(2)
    before = time.monotonic()
    assert len(list(counted(shards(), two.of(1)))) == len(SHAPES)
    assert idle_s() > time.monotonic() - before - 0.05  # nobody looks
    with two.watched():
        assert len(list(counted(shards(), two.of(1)))) == len(SHAPES)
        assert idle_s() < (time.monotonic() - before) / 2
    sign = two.of(0)
    two.close()
    assert len(list(counted(shards(), sign))) == len(SHAPES)  # without memory, without signs
    assert len(list(counted(shards(), two.of(0)))) == len(SHAPES)


def test_what_comes_to_workers_of_another_node_is_progress_of_their_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_progress, "LOOK_S", 0.02)
    two = WorkerProgress(2)
    sign = two.of(1, is_apart=True)
    assert sign is not None
    assert "path" not in sign, "no memory that another node could map"
    before = time.monotonic()
    with two.watched():
        list(counted(shards(), {**sign, "secret": "00" * 16}))
        assert idle_s() > time.monotonic() - before - 0.1, "a stranger's datagrams are no progress"
        assert len(list(counted(shards(), sign))) == len(SHAPES)
        assert idle_s() < (time.monotonic() - before) / 2
    two.close()
    assert len(list(counted(shards(), sign))) == len(SHAPES), "nobody listens any more"
