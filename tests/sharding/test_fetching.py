"""Threads of a pull that was broken off, which outlive it."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from sharding_cases import dim0_sharded, random_tensors, rollout_group, train_group, whole_target

from rlsdk.interfaces import SyncReceipt, WeightShard
from rlsdk.sharding import GenericShardingManager, WeightTarget
from rlsdk.sharding.transfer import fetching
from rlsdk.sharding.transports.object_store import ObjectStoreTransport
from rlsdk.testing.sharding.local_groups import LocalPeer
from rlsdk.testing.sharding.tensor_engines import TensorRolloutEngine

SHAPES = {"layer": (6, 5), "norm": (5,)}
PATIENCE_S = 10.0


class Rank(LocalPeer):
    """A source that knows one transport only."""

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        buckets, *sync = args
        by_call = [replace(bucket, transport="object_store") for bucket in buckets]
        return super().call(method, by_call, *sync, timeout_s=timeout_s)


class BreaksOff(TensorRolloutEngine):
    """Gives up behind the first piece, when the next is on its way."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        if version == 1:
            next(iter(shards))
            assert Second.begun.wait(PATIENCE_S)
            raise OSError("the engine gave up")
        return super().update_weights(shards, version)


class First(ObjectStoreTransport):
    """Closes when the end of the other source has been made, as by a thread that comes late."""

    closing = threading.Event()
    late = threading.Event()

    def close(self) -> None:
        self.closing.set()
        self.late.wait(PATIENCE_S)


class Second(ObjectStoreTransport):
    """Made while the other is being closed."""

    begun = threading.Event()

    def __init__(self) -> None:
        self.begun.set()
        assert First.closing.wait(PATIENCE_S)
        threading.Timer(0.05, First.late.set).start()


def test_a_thread_that_comes_late_neither_breaks_the_closing_nor_leaves_anything_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`dictionary changed size during iteration`, in place of what was wrong: 5 of 1,200 syncs broken off."""
    train = train_group(random_tensors(SHAPES), dim0_sharded(SHAPES, 2))
    layout = whole_target(SHAPES)
    rollout = rollout_group([[layout]])
    plan = GenericShardingManager(train, rollout, transports=("object_store",)).plan(dim0_sharded(SHAPES, 2), [layout])
    buckets = [replace(bucket, round=bucket.source, transport=f"of {bucket.source}") for bucket in plan.buckets]
    assert [bucket.source for bucket in buckets] == [0, 1]
    peers = {source: Rank(host, is_local=False) for source, host in enumerate(train.hosts)}
    ends = {"of 0": First, "of 1": Second}
    for kind, name in ((First, "closing"), (First, "late"), (Second, "begun")):
        monkeypatch.setattr(kind, name, threading.Event())
    monkeypatch.setattr(fetching, "make_transport", lambda name: ends[name]())
    monkeypatch.setattr(fetching, "named_transports", lambda names: [ends[name] for name in names])
    target = WeightTarget(BreaksOff([layout]))
    with pytest.raises(OSError, match="the engine gave up"):
        target.pull(buckets, peers, 1, PATIENCE_S)
    assert First.late.is_set()
    ends |= {"of 0": ObjectStoreTransport, "of 1": ObjectStoreTransport}
    assert target.pull(buckets, peers, 2, 60.0).version == 2
