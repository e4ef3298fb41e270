"""The ring through device memory as far as it goes without a GPU: who it is chosen for, what is exported, who opens it.

The protocol is that of `test_ring`, over memory that stands for a device's; device memory itself has not been run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from sharding_cases import dim0_sharded, export, random_tensors, rollout_group, train_group, whole_target

from rlsdk.interfaces import Box, LayoutError, WeightLayout, WeightShard, WeightSyncError
from rlsdk.kit.ranks.shared_memory import AttachError
from rlsdk.sharding import TRANSPORTS, GenericShardingManager
from rlsdk.sharding.plan.planner import choose_transport, plan_reshard
from rlsdk.sharding.transfer.fetching import Feed, OpenTransports
from rlsdk.sharding.transfer.source import WeightSource
from rlsdk.sharding.transfer.target import WeightTarget
from rlsdk.sharding.transports import ring_memory, table
from rlsdk.sharding.transports.ring_memory import HANDLE, OPENERS, HostMemory, RingMemory, open_cuda, open_memory
from rlsdk.sharding.transports.ring_transport import DeviceRingTransport
from rlsdk.sharding.transports.table import allowed_transports, named_transports
from rlsdk.testing.sharding.tensor_engines import TensorRolloutEngine, TensorTrainEngine

SHAPES = {"w": (33, 17), "b": (5,)}


class FakeDevice(RingMemory):
    """Memory of a device that another process than its owner opens. Its bytes are in shared memory of the host."""

    kind = "fake device"
    opened: ClassVar[list[torch.device | None]] = []

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        super().__init__(num_slots, slot_bytes)
        self._host = HostMemory(num_slots, slot_bytes)

    @property
    def data(self) -> torch.Tensor:
        return self._host.data

    def export(self) -> dict[str, Any]:
        return {"memory": self._host.export()}

    @classmethod
    def open(cls, exported: Mapping[str, Any], device: torch.device | None) -> torch.Tensor:
        cls.opened.append(device)
        return open_memory({**exported["memory"], "kind": HostMemory.kind}, device)


class OnFakeDevice(DeviceRingTransport):
    """The same transport between processes that hold their weights in host memory."""

    @classmethod
    def reaches(cls, source: WeightLayout, target: WeightLayout) -> bool:
        return source.node == target.node and source.process != target.process

    def _memory(self, slot_bytes: int, device: torch.device | None) -> RingMemory:
        return FakeDevice(self.num_slots, slot_bytes)


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPENERS, FakeDevice.kind, FakeDevice.open)
    monkeypatch.setattr(table, "TRANSPORTS", (table.InProcessTransport, OnFakeDevice))
    FakeDevice.opened.clear()


def shards_of(seed: int, rows: int = 33) -> list[WeightShard]:
    tensors = random_tensors({"w": (rows, 17), "b": (5,)}, seed=seed)
    return [WeightShard(name=name, box=Box.whole(tuple(t.shape)), tensor=t) for name, t in tensors.items()]


PLACES = {
    "same process": {},
    "same GPU": {"process": "rollout"},
    "other GPU": {"process": "rollout", "device": "cuda:1"},
    "other node": {"process": "rollout", "node": "elsewhere"},
    "host of the node": {"process": "rollout", "device": "cpu"},
    "host elsewhere": {"process": "rollout", "node": "elsewhere", "device": "cpu"},
}
ON_GPU = {
    "same process": "in_process",
    "same GPU": "device_ring",
    "other GPU": "device_ring",
    "other node": "process_group",
    "host of the node": "ring",
    "host elsewhere": "object_store",
}
"""What auto takes from a source on a GPU."""


@pytest.mark.parametrize("place", PLACES)
def test_between_gpus_auto_never_passes_through_the_host(place: str) -> None:
    source = whole_target(SHAPES, process="train", device="cuda:0")
    target = replace(source, **PLACES[place])
    assert choose_transport(source, target, TRANSPORTS) == ON_GPU[place]
    # On the host nothing changes: a network that a process group could use may not be there.
    source, target = replace(source, device="cpu"), replace(target, device="cpu")
    if source.process != target.process:
        assert choose_transport(source, target, TRANSPORTS) in ("ring", "object_store")


@pytest.mark.parametrize("name", ["device_ring", "cuda_ipc", "process_group"])
def test_either_of_both_by_name_takes_what_the_other_cannot(name: str) -> None:
    """NCCL refuses two ranks on one GPU, and two nodes share no memory."""
    allowed = named_transports(allowed_transports(name))
    source = whole_target(SHAPES, process="train", device="cuda:0")
    for place in ("same process", "same GPU", "other GPU", "other node"):
        assert choose_transport(source, replace(source, **PLACES[place]), allowed) == ON_GPU[place]
    with pytest.raises(LayoutError, match=r"sharding\.transport: auto finds one"):
        choose_transport(source, replace(source, **PLACES["host of the node"]), allowed)


def test_two_processes_move_weights_through_it_again_and_again(fake_device: None) -> None:
    shapes = {"embed": (400, 8), "layer.w": (160, 24), "norm": (8,)}
    values = random_tensors(shapes)
    train = train_group(values, dim0_sharded(shapes, 2))
    rollout = rollout_group([[whole_target(shapes, rank)] for rank in range(2)])
    manager = GenericShardingManager(train, rollout, bucket_bytes=2048)
    for version in range(1, 4):
        report = manager.sync(version)
        assert report.transports == ("device_ring",)
        for host in rollout.hosts:
            for name, _, tensor in host.engine.served:
                assert torch.equal(tensor, values[name])
        train.run("optim_step")
        values = {name: tensor + 0.125 for name, tensor in values.items()}
    assert FakeDevice.opened == [None] * 4, "each target opens each source's memory once, on its own device"
    for host in (*train.hosts, *rollout.hosts):
        (host.source if hasattr(host, "source") else host.target).close()


def test_bytes_that_changed_on_the_way_are_refused(fake_device: None) -> None:
    source, target = OnFakeDevice(), OnFakeDevice()
    came = target.fetch(export(source, shards_of(1), ["float32"] * 2), [((33, 17), "float32"), ((5,), "float32")])
    next(came)[0, 0] += 1
    with pytest.raises(WeightSyncError, match="overwritten or corrupted"):
        list(came)
    source.close()
    target.close()


def test_memory_that_cannot_be_opened_leaves_the_way_over_the_host(
    fake_device: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a container hides the device: the sync says so once, and goes on."""

    def closed(exported: Mapping[str, Any], device: torch.device | None) -> torch.Tensor:
        raise AttachError("the source's memory on the device GPU-5d2f cannot be opened: invalid device context")

    monkeypatch.setitem(OPENERS, FakeDevice.kind, closed)
    monkeypatch.setattr(table, "TRANSPORTS", (OnFakeDevice, table.RingTransport))
    tensors = {name: shard.tensor for name, shard in zip(SHAPES, shards_of(0), strict=True)}
    layout = whole_target(SHAPES, process="train")
    train = WeightSource(TensorTrainEngine(tensors, layout))
    target = WeightTarget(TensorRolloutEngine([whole_target(SHAPES, process="rollout")]))
    plan = plan_reshard([layout], list(target.layouts()), bucket_bytes=1 << 20, transports=[OnFakeDevice])
    asked: list[str] = []

    class Near:
        def local(self) -> Any:
            return None

        def call(self, method: str, buckets: Any, sync: str, *, timeout_s: float) -> Any:
            asked.append(buckets[0].transport)
            return train.export(buckets)

    transports: OpenTransports = OpenTransports()
    instead: dict[tuple[str, int], str] = {}
    for _ in range(2):
        found = list(Feed(deque(plan.buckets), Near(), transports, instead, 60.0).next())
        assert all(torch.equal(shard.tensor, tensors[shard.name]) for shard in found)
    assert asked == ["device_ring", "ring", "ring"]
    assert caplog.text.count("cannot come by device_ring") == 1
    transports.close()
    train.close()


def test_memory_is_opened_on_the_device_that_holds_it_or_else_on_the_readers_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(ring_memory, "device_uuid", lambda device: f"GPU-{device.index}")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    opened: list[tuple[Any, ...]] = []

    def open_storage(*values: Any) -> None:
        opened.append(values)
        raise RuntimeError("invalid device context")

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", open_storage)
    handle = dict(zip(HANDLE, (7, b"m", 64, 0, b"c", 0, b"e", True), strict=True))
    own = torch.device("cuda", 1)
    for uuid, device in (("GPU-2", own), ("GPU-hidden", own), ("GPU-hidden", None)):
        with pytest.raises(AttachError, match=f"on the device {uuid} cannot be opened: invalid device context"):
            open_cuda({**handle, "uuid": uuid}, device)
    assert [values[0] for values in opened] == [2, 1, 0]
    assert all(values[1:] == (b"m", 64, 0, b"c", 0, b"e", True) for values in opened)


def test_torch_still_has_what_the_memory_calls() -> None:
    assert callable(torch.UntypedStorage._share_cuda_)
    assert callable(torch.UntypedStorage._new_shared_cuda)
