"""Weights read from another process's memory, by NIXL over TCP."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
import torch
from sharding_cases import export, metas_of, random_tensors, rollout_group, split_box, whole_target
from sharding_processes import train_processes

from rlsdk.interfaces import Box, ConfigError, WeightLayout, WeightShard, WeightSyncError
from rlsdk.sharding import TRANSPORTS, GenericShardingManager
from rlsdk.sharding.plan.planner import choose_transport
from rlsdk.sharding.transfer import receiving
from rlsdk.sharding.transfer.receiving import parcel, receive
from rlsdk.sharding.transports import nixl_agent
from rlsdk.sharding.transports.remote_memory import RemoteMemoryTransport, _runs_of
from rlsdk.sharding.transports.table import allowed_transports, named_transports
from rlsdk.testing.sharding.tensor_engines import tensor_layout

SHAPES = {"embed": (1000, 64), "layer.w": (301, 199), "layer.b": (7,), "scale": (3, 5, 2), "one": (1,), "norm": (64,)}
WIDE = {"w": (64, 4099), "v": (96, 4096)}
needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="rlsdk[nixl] is not installed")


@pytest.fixture(autouse=True)
def by_tcp(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Not by shared memory, which both ends would find; nothing may be left of this process's end."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    yield
    gc.collect()
    assert nixl_agent._OfProcess.agent is None


def managed(train: Any, wanted: list[WeightLayout], **more: Any) -> tuple[Any, GenericShardingManager, Any]:
    rollout = rollout_group([wanted])
    manager = GenericShardingManager(train, rollout, bucket_bytes=60_000, transports=["nixl"], **more)
    plan = manager.plan(manager.ends().source, manager.ends().target)
    assert {bucket.transport for bucket in plan.buckets} == {"nixl"}
    return rollout, manager, plan


@needs_nixl
def test_two_processes_are_read_bit_for_bit_again_and_again() -> None:
    """In float32 where the weights are; in bfloat16 what the source has packed. Then by a worker that can call nobody,
    from what it was told."""
    values = random_tensors(SHAPES)
    with train_processes(SHAPES, 2) as train:
        for dtype in ("float32", "bfloat16"):
            values = bring_four_times(train, values, dtype)
        rollout, _, plan = managed(train, [whole_target(SHAPES, dtype="bfloat16")])
        order, handles = rollout.hosts[0].target.order(), {}
        for source, peer in enumerate(train.peers()):
            mine = [bucket for bucket in plan.buckets if bucket.source == source]
            handles[source] = peer.call("export_weights", mine, timeout_s=30.0)
        for shard in receive(parcel(plan.buckets, handles, order, 1, 30.0)):
            whole = values[shard.name].to(torch.bfloat16)
            assert torch.equal(shard.tensor, whole[shard.box.slices(Box.whole(SHAPES[shard.name]))])
        receiving._open.close()
        receiving._open = type(receiving._open)()


def bring_four_times(train: Any, values: dict[str, torch.Tensor], dtype: str) -> dict[str, torch.Tensor]:
    rollout, manager, plan = managed(train, [whole_target(SHAPES, dtype=dtype)])
    registered = []
    with counted_calls(train) as calls:
        for version in range(4):
            calls.clear()
            report = manager.sync_weights(plan, version)
            assert report.transports == ("nixl",)
            assert calls.count("export_weights") == 2
            agent = nixl_agent._OfProcess.agent
            assert agent is not None
            registered.append(agent.registered_bytes)
            for name, box, tensor in rollout.hosts[0].engine.served:
                assert torch.equal(tensor, values[name][box.slices(Box.whole(SHAPES[name]))].to(tensor.dtype))
            train.run("optim_step")
            values = {name: tensor + 0.125 for name, tensor in values.items()}
    assert len(set(registered)) == 1
    rollout.hosts[0].target.close()
    return values


@contextmanager
def counted_calls(train: Any) -> Iterator[list[str]]:
    calls: list[str] = []
    known = [peer.call for peer in train.hosts]
    for peer, call in zip(train.hosts, known, strict=True):
        peer.call = lambda *args, call=call, **more: calls.append(args[0]) or call(*args, **more)
    yield calls
    for peer, call in zip(train.hosts, known, strict=True):
        peer.call = call


def columns(parts: int) -> list[WeightLayout]:
    wanted = []
    for at in range(parts):
        boxes = [(n, split_box(s, 1, [s[1] * i // parts for i in range(1, parts)])[at]) for n, s in WIDE.items()]
        wanted.append(tensor_layout(metas_of(WIDE), boxes, rank=at, process=f"rollout:{at}"))
    return wanted


@needs_nixl
def test_columns_are_read_run_by_run_or_packed_where_runs_are_short() -> None:
    """Places of a replica, each with its columns of every matrix: 8 kB a row of two, 3 kB of five."""
    values = random_tensors(WIDE)
    with train_processes(WIDE, 1) as train:
        for parts in (2, 5):
            rollout, manager, plan = managed(train, columns(parts))
            for version in range(2):
                manager.sync_weights(plan, version, expect_change=False)
                for name, box, tensor in rollout.hosts[0].engine.served:
                    assert torch.equal(tensor, values[name][box.slices(Box.whole(WIDE[name]))])
            rollout.hosts[0].target.close()


@needs_nixl
def test_a_source_that_is_killed_in_the_middle_ends_the_sync() -> None:
    with train_processes(SHAPES, 1) as train:
        rollout, manager, plan = managed(train, [whole_target(SHAPES)], timeout_s=5.0)
        manager.sync_weights(plan, 0)
        read, target = RemoteMemoryTransport.fetch_into, rollout.hosts[0].target

        def read_two(self: Any, *args: Any) -> None:
            read(self, *args)
            if args[1]["number"] % len(plan.buckets) == 1:
                os.kill(train.pids[0], signal.SIGKILL)
                while psutil.Process(train.pids[0]).status() != psutil.STATUS_ZOMBIE:
                    time.sleep(0.01)

        RemoteMemoryTransport.fetch_into = read_two  # type: ignore[method-assign]
        start = time.monotonic()
        try:
            with pytest.raises(WeightSyncError, match=r"did not arrive .* by nixl: .* could not be read"):
                target.pull(plan.buckets, {0: train.peers()[0]}, 1, 5.0)
        finally:
            RemoteMemoryTransport.fetch_into = read  # type: ignore[method-assign]
        assert time.monotonic() - start < 20
        assert rollout.hosts[0].engine.version == 0
        target.close()


@needs_nixl
def test_a_source_that_stands_still_is_an_error_in_time_and_serves_again_when_it_goes_on() -> None:
    with train_processes(SHAPES, 1) as train:
        rollout, manager, plan = managed(train, [whole_target(SHAPES, dtype="bfloat16")], timeout_s=2.0)
        manager.sync_weights(plan, 0)
        target, peer = rollout.hosts[0].target, train.peers()[0]
        call = peer.call

        def stop_behind(*args: Any, **more: Any) -> Any:
            answer = call(*args, **more)
            os.kill(train.pids[0], signal.SIGSTOP)
            return answer

        peer.call = stop_behind
        start = time.monotonic()
        try:
            with pytest.raises(WeightSyncError, match=r"(nothing came from|did not have them ready)"):
                target.pull(plan.buckets, {0: peer}, 1, 2.0)
        finally:
            peer.call = call
            os.kill(train.pids[0], signal.SIGCONT)
        assert time.monotonic() - start < 20
        manager.sync_weights(plan, 2, expect_change=False)
        assert rollout.hosts[0].engine.version == 2
        target.close()


def a_shard(tensor: torch.Tensor) -> WeightShard:
    return WeightShard(name="w", box=Box.whole(tuple(tensor.shape)), tensor=tensor)


@needs_nixl
def test_memory_is_registered_until_it_is_freed_or_the_last_end_closes() -> None:
    source, target = RemoteMemoryTransport(), RemoteMemoryTransport()
    weight = torch.randn(300, 50)
    for _ in range(2):
        (came,) = target.fetch(export(source, [a_shard(weight)], ["float32"]), [((300, 50), "float32")])
        assert torch.equal(came, weight)
    agent = nixl_agent._OfProcess.agent
    assert agent is not None
    held = agent.registered_bytes
    assert held >= 2 * weight.nbytes
    source.close()
    assert nixl_agent._OfProcess.agent is agent
    del weight, came
    gc.collect()
    assert agent.registered_bytes <= held - 300 * 50 * 4 - 4096
    target.close()
    assert agent.registered_bytes == 0


@needs_nixl
def test_an_engine_may_move_its_weights_between_two_syncs() -> None:
    """As one that offloads them: the target learns of the new place, and what stood there before is not read."""
    with train_processes({"w": (500, 100)}, 1) as train:
        rollout, manager, plan = managed(train, [whole_target({"w": (500, 100)})])
        manager.sync_weights(plan, 0)
        wanted = random_tensors({"w": (500, 100)})["w"]
        for version in (1, 2):
            train.run("move_weights")
            train.run("optim_step")
            wanted = wanted + 0.125
            manager.sync_weights(plan, version)
            (_, _, served) = rollout.hosts[0].engine.served[0]
            assert torch.equal(served, wanted)
        rollout.hosts[0].target.close()


@needs_nixl
def test_what_the_source_cannot_pack_is_its_error_at_the_target() -> None:
    source, target = RemoteMemoryTransport(), RemoteMemoryTransport()
    shard = WeightShard(name="w", box=Box.whole((4,)), tensor=torch.ones(5))
    target.timeout_s = 10.0
    with pytest.raises(WeightSyncError, match="the source could not pack them: RuntimeError"):
        target.fetch(export(source, [shard], ["bfloat16"]), [((4,), "bfloat16")])
    (came,) = target.fetch(export(source, [a_shard(torch.ones(4))], ["bfloat16"]), [((4,), "bfloat16")])
    assert came.sum() == 4
    source.close()
    target.close()


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.zeros(4, 8), (1, 128, 128)),
        (torch.zeros(1, 8).t(), (1, 32, 32)),
        (torch.zeros(()), (1, 4, 4)),
        (torch.zeros(3, 4096)[:, 1024:2048], (3, 4096, 16384)),
        (torch.zeros(3, 4096)[1:, 1024:2048], (2, 4096, 16384)),
        (torch.zeros(2, 3, 4096)[:, :, :1024], (6, 4096, 16384)),
        (torch.zeros(2, 1, 4096)[:, :, :1024], (2, 4096, 16384)),
        (torch.zeros(3, 4096)[:, :1023], None),  # short
        (torch.zeros(2, 4, 4096)[:, :3, :1024], None),  # uneven
        (torch.zeros(64, 64).t(), None),
        (torch.zeros(1, 2048).expand(4, 2048), None),  # the same row four times
        (torch.zeros(4096, 2)[:, :1], None),
    ],
)
def test_runs_of_memory_that_a_view_is(tensor: torch.Tensor, expected: tuple[int, int, int] | None) -> None:
    found = _runs_of(tensor)
    assert (found and found[1:]) == expected
    if found is not None:
        assert found[0] == tensor.data_ptr()
        assert found[1] * found[2] == tensor.nbytes


PLACES = [("a", "cpu"), ("b", "cpu"), ("a", "cuda:0"), ("a", "cuda:1"), ("b", "cuda:0")]


@pytest.mark.parametrize("source", PLACES)
@pytest.mark.parametrize("target", PLACES)
def test_only_its_name_chooses_it(source: tuple[str, str], target: tuple[str, str]) -> None:
    held, wanted = (
        whole_target(SHAPES, process=side, node=node, device=device)
        for side, (node, device) in (("train", source), ("rollout", target))
    )
    assert choose_transport(held, wanted, TRANSPORTS) != "nixl"
    named = named_transports(allowed_transports("nixl"))
    assert choose_transport(held, wanted, named) == "nixl"
    assert choose_transport(held, held, named) == "in_process"


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "LIBRARY", ("rlsdk_no_such_module",))
    with pytest.raises(
        ConfigError, match=r'sharding.transport: nixl needs the package nixl .* pip install "rlsdk\[nixl'
    ):
        export(RemoteMemoryTransport(), [a_shard(torch.ones(4))], ["float32"])
