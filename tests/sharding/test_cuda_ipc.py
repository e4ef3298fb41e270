"""CUDA IPC as far as it goes without a GPU: who it is chosen for, what its handle holds, when memory is opened."""

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from sharding_cases import export, random_tensors, whole_target
from torch import Tensor

from rlsdk.interfaces import Box, LayoutError, WeightShard, WeightSyncError
from rlsdk.kit.ranks.shared_memory import AttachError
from rlsdk.sharding import TRANSPORTS
from rlsdk.sharding.plan.planner import choose_transport, plan_reshard
from rlsdk.sharding.transfer.fetching import Feed, OpenTransports
from rlsdk.sharding.transfer.source import WeightSource
from rlsdk.sharding.transfer.target import WeightTarget
from rlsdk.sharding.transports.cuda_ipc import HANDLE, CudaIpcTransport
from rlsdk.sharding.transports.table import allowed_transports, named_transports
from rlsdk.testing.sharding.tensor_engines import TensorRolloutEngine, TensorTrainEngine

SHAPES = {"w": (33, 17), "b": (5,)}


class OnHost(CudaIpcTransport):
    """The same, with memory of this process in place of a GPU's."""

    blocks: ClassVar[dict[bytes, Tensor]] = {}
    opened = 0

    def _take(self, num_bytes: int, device: torch.device) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def _share(self, block: Tensor) -> dict[str, Any]:
        name = f"block {len(self.blocks)}".encode()
        self.blocks[name] = block
        return dict(zip(HANDLE, (0, name, len(block), 0, b"counter", 0, b"event", True), strict=True))

    def _open(self, handle: Mapping[str, Any]) -> Tensor:
        assert tuple(handle) == HANDLE
        type(self).opened += 1
        return self.blocks[handle["memory"]]


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
    "same GPU": "cuda_ipc",
    "other GPU": "process_group",
    "other node": "process_group",
    "host of the node": "shared_memory",
    "host elsewhere": "inline",
}
"""What auto takes from a source on a GPU, without a Ray object store."""


@pytest.mark.parametrize("place", PLACES)
def test_between_gpus_auto_never_passes_through_the_host(place: str) -> None:
    source = whole_target(SHAPES, process="train", device="cuda:0")
    target = replace(source, **PLACES[place])
    assert choose_transport(source, target, TRANSPORTS) == ON_GPU[place]
    # On the host nothing changes: a network that a process group could use may not be there.
    source, target = replace(source, device="cpu"), replace(target, device="cpu")
    if source.process != target.process:
        assert choose_transport(source, target, TRANSPORTS) in ("shared_memory", "inline")


@pytest.mark.parametrize("name", ["cuda_ipc", "process_group"])
def test_either_of_both_by_name_takes_what_the_other_cannot(name: str) -> None:
    """Two processes on one GPU are no ranks of NCCL's, and two GPUs share no handle."""
    allowed = named_transports(allowed_transports(name))
    source = whole_target(SHAPES, process="train", device="cuda:0")
    for place in ("same process", "same GPU", "other GPU", "other node"):
        assert choose_transport(source, replace(source, **PLACES[place]), allowed) == ON_GPU[place]
    with pytest.raises(LayoutError, match=r"sharding\.transport: auto finds one"):
        choose_transport(source, replace(source, **PLACES["host of the node"]), allowed)


def test_a_handle_that_cannot_be_opened_leaves_the_way_over_the_host(caplog: pytest.LogCaptureFixture) -> None:
    """As where a container hides the device: the sync says so once, and goes on."""
    tensors = {name: shard.tensor for name, shard in zip(SHAPES, shards_of(0), strict=True)}
    source = whole_target(SHAPES, process="train")
    train = WeightSource(TensorTrainEngine(tensors, source))
    target = WeightTarget(TensorRolloutEngine([whole_target(SHAPES, process="rollout")]))
    plan = plan_reshard([source], list(target.layouts()), bucket_bytes=1 << 20, transports=TRANSPORTS)
    bucket = replace(plan.buckets[0], transport="cuda_ipc")
    unopened = AttachError("the source's memory on cuda:0 cannot be opened: invalid device context")
    asked = []

    class Open(OpenTransports):
        def fetch(self, bucket: Any, handle: Any, timeout_s: float) -> Any:
            asked.append(bucket.transport)
            if bucket.transport == "cuda_ipc":
                raise unopened
            return super().fetch(bucket, handle, timeout_s)

    class Near:
        def local(self) -> Any:
            return None

        def call(self, method: str, buckets: Any, timeout_s: float) -> Any:
            if buckets[0].transport == "cuda_ipc":
                return [{} for _ in buckets]
            return train.export(buckets)

    transports, instead = Open(), {}
    for _ in range(2):
        found = list(Feed(deque([bucket]), Near(), transports, instead, 60.0).next())
        assert all(torch.equal(shard.tensor, tensors[shard.name]) for shard in found)
    assert asked == ["cuda_ipc", "shared_memory", "shared_memory"]
    assert caplog.text.count("cannot come by cuda_ipc") == 1
    transports.close()
    train.close()


def test_its_handle_is_plain_and_two_blocks_are_opened_once_each() -> None:
    source, target, before = OnHost(), OnHost(), OnHost.opened
    for seed in range(5):
        shards = shards_of(seed)
        handle = export(source, shards, ["float32", "bfloat16"])
        assert all(isinstance(value, int | bytes | bool | list) for value in handle.values())
        came = target.fetch(handle, [((33, 17), "float32"), ((5,), "bfloat16")])
        for shard, tensor in zip(shards, came, strict=True):
            assert torch.equal(tensor, shard.tensor.to(tensor.dtype))
    assert OnHost.opened == before + 2


def test_a_larger_bucket_gets_a_block_that_is_opened_anew() -> None:
    source, target = OnHost(), OnHost()
    for rows in (33, 33, 400, 400, 10):
        shards = shards_of(1, rows)
        metas = [((rows, 17), "float32"), ((5,), "float32")]
        for shard, tensor in zip(shards, target.fetch(export(source, shards, ["float32"] * 2), metas), strict=True):
            assert torch.equal(tensor, shard.tensor)


def test_bytes_that_changed_on_the_way_are_refused() -> None:
    source, target = OnHost(), OnHost()
    came = target.fetch(export(source, shards_of(1), ["float32"] * 2), [((33, 17), "float32"), ((5,), "float32")])
    next(came)[0, 0] += 1
    with pytest.raises(WeightSyncError, match="overwritten or corrupted"):
        list(came)


def test_torch_still_has_what_the_transport_calls() -> None:
    assert callable(torch.UntypedStorage._share_cuda_)
    assert callable(torch.UntypedStorage._new_shared_cuda)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the memory would be opened")
def test_memory_that_cannot_be_opened_is_an_error_of_the_sync() -> None:
    handle = export(OnHost(), shards_of(1), ["float32"] * 2)
    with pytest.raises(WeightSyncError, match="on cuda:0 cannot be opened"):
        CudaIpcTransport().fetch(handle, [((33, 17), "float32"), ((5,), "float32")])
