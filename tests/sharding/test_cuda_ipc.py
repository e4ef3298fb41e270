"""CUDA IPC as far as it goes without a GPU: who it is chosen for, what its handle holds, when memory is opened."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from sharding_cases import random_tensors, whole_target
from torch import Tensor

from rlsdk.interfaces import Box, WeightShard, WeightSyncError
from rlsdk.sharding import TRANSPORTS
from rlsdk.sharding.cuda_ipc import HANDLE, CudaIpcTransport
from rlsdk.sharding.planner import choose_transport

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


def test_it_is_chosen_between_processes_of_one_gpu_and_nowhere_else() -> None:
    source = whole_target(SHAPES, process="train", device="cuda:0")
    target = whole_target(SHAPES, device="cuda:0")
    preferred = (CudaIpcTransport, *TRANSPORTS)
    assert choose_transport(source, target, preferred) == "cuda_ipc"
    assert choose_transport(source, target, TRANSPORTS) == "shared_memory"  # until it was run, by name only
    for other in (
        replace(target, device="cuda:1"),
        replace(target, node="elsewhere"),
        replace(target, device="cpu"),
        replace(target, process=source.process),
    ):
        assert choose_transport(source, other, preferred) != "cuda_ipc"
    assert not CudaIpcTransport.reaches(replace(source, device="cpu"), replace(target, device="cpu"))


def test_its_handle_is_plain_and_two_blocks_are_opened_once_each() -> None:
    source, target, before = OnHost(), OnHost(), OnHost.opened
    for seed in range(5):
        shards = shards_of(seed)
        handle = source.export(shards, ["float32", "bfloat16"])
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
        for shard, tensor in zip(shards, target.fetch(source.export(shards, ["float32"] * 2), metas), strict=True):
            assert torch.equal(tensor, shard.tensor)


def test_bytes_that_changed_on_the_way_are_refused() -> None:
    source, target = OnHost(), OnHost()
    came = target.fetch(source.export(shards_of(1), ["float32"] * 2), [((33, 17), "float32"), ((5,), "float32")])
    next(came)[0, 0] += 1
    with pytest.raises(WeightSyncError, match="overwritten or corrupted"):
        list(came)


def test_torch_still_has_what_the_transport_calls() -> None:
    assert callable(torch.UntypedStorage._share_cuda_)
    assert callable(torch.UntypedStorage._new_shared_cuda)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the memory would be opened")
def test_memory_that_cannot_be_opened_is_an_error_of_the_sync() -> None:
    handle = OnHost().export(shards_of(1), ["float32"] * 2)
    with pytest.raises(WeightSyncError, match="on cuda:0 cannot be opened"):
        CudaIpcTransport().fetch(handle, [((33, 17), "float32"), ((5,), "float32")])
