"""Transports: bitwise, within bounds, and leaving nothing behind."""

import errno
import gc
import os
import weakref
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from sharding_cases import export, random_tensors

from rlsdk.interfaces import Box, WeightShard, WeightSyncError
from rlsdk.kit.ranks.shared_memory import AttachError, SharedBlock, attach, share
from rlsdk.sharding.transports.ring_transport import RingTransport
from rlsdk.sharding.transports.table import make_transport
from rlsdk.sharding.transports.transport import Transport
from rlsdk.sharding.transports.wire import announcement

MOVED = {"w": (33, 17), "b": (5,), "s": (), "e": (0, 3), "x": (64, 64)}
BETWEEN_HOSTS = [
    "process_group",
    pytest.param("nixl", marks=pytest.mark.skipif(find_spec("nixl") is None, reason="rlsdk[nixl] is not installed")),
]
HERE = ["in_process", "ring", "object_store", *BETWEEN_HOSTS]
COPYING = ["ring", "object_store"]


def shards_of(dtype: str = "float32", seed: int = 0) -> list[WeightShard]:
    tensors = random_tensors(MOVED, dtype, seed)
    return [WeightShard(name=n, box=Box.whole(MOVED[n]), tensor=t) for n, t in tensors.items()]


def move(
    name: str, shards: list[WeightShard], dtypes: list[str], ends: tuple[Transport, Transport] | None = None
) -> list[torch.Tensor]:
    source, target = ends or (make_transport(name), make_transport(name))
    metas = [(s.box.size, d) for s, d in zip(shards, dtypes, strict=True)]
    return list(target.fetch(export(source, shards, dtypes), metas))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool"])
def test_every_tensor_arrives_bit_for_bit(name: str, dtype: str) -> None:
    shards = shards_of(dtype)
    for shard, came in zip(shards, move(name, shards, [dtype] * len(shards)), strict=True):
        assert came.dtype == shard.tensor.dtype
        assert torch.equal(came, shard.tensor)


@pytest.mark.parametrize("name", HERE)
def test_dtypes_are_converted_on_the_way_each_to_its_own(name: str) -> None:
    shards = shards_of()
    dtypes = ["bfloat16", "float32", "float16", "bfloat16", "float32"]
    for shard, dtype, came in zip(shards, dtypes, move(name, shards, dtypes), strict=True):
        assert torch.equal(came, shard.tensor.to(getattr(torch, dtype)))


@pytest.mark.parametrize("name", HERE)
def test_strided_views_and_parameters_can_be_sent(name: str) -> None:
    weight = torch.nn.Parameter(torch.randn(8, 6))
    shard = WeightShard(name="w", box=Box((0, 2), (6, 3)), tensor=weight.t()[:, 2:5])
    (came,) = move(name, [shard], ["float32"])
    assert torch.equal(came, weight.t()[:, 2:5])
    assert not came.requires_grad


def test_within_a_process_nothing_is_copied() -> None:
    shards = shards_of()
    for shard, came in zip(shards, move("in_process", shards, ["float32"] * len(shards)), strict=True):
        assert came.data_ptr() == shard.tensor.data_ptr()


def test_a_larger_bucket_gets_larger_slots() -> None:
    source, target = make_transport("ring"), make_transport("ring")
    for elements in (10, 10, 2_000_000, 2_000_000, 10):
        shard = WeightShard(name="w", box=Box.whole((elements,)), tensor=torch.randn(elements))
        (came,) = move("ring", [shard], ["float32"], (source, target))
        assert torch.equal(came, shard.tensor)


@pytest.mark.parametrize("name", [*COPYING, *BETWEEN_HOSTS])
def test_nothing_is_left_behind_after_close(name: str) -> None:
    gc.collect()
    fds = descriptors()
    source, target = make_transport(name), make_transport(name)
    for seed in range(3):
        move(name, shards_of(seed=seed), ["float32"] * 5, (source, target))
    source.close()
    target.close()
    gc.collect()
    assert descriptors() == fds


@pytest.mark.parametrize("name", [*COPYING, "process_group"])
def test_bytes_that_changed_on_the_way_are_refused(name: str) -> None:
    source, target = make_transport(name), make_transport(name)
    shards = shards_of()
    came = target.fetch(export(source, shards, ["float32"] * 5), [(s.box.size, "float32") for s in shards])
    next(came)[0, 0] += 1
    with pytest.raises(WeightSyncError, match="overwritten or corrupted on the way"):
        list(came)


@pytest.mark.parametrize("name", [*COPYING, *BETWEEN_HOSTS])
def test_a_bucket_of_another_size_is_refused(name: str) -> None:
    source, target = make_transport(name), make_transport(name)
    handle = export(source, shards_of(), ["float32"] * 5)
    with pytest.raises(WeightSyncError, match="a bucket of 64 bytes was asked for, but the source announced"):
        target.fetch(handle, [((4,), "float32")])
    source.close()


def test_a_block_that_is_gone_cannot_be_attached() -> None:
    block = SharedBlock(100)
    name = block.name
    block.close()
    with pytest.raises(AttachError, match=r"cannot open the source's shared memory|no longer the block"):
        attach(name)


def test_a_path_that_leads_to_another_block_by_now_is_refused() -> None:
    block = SharedBlock(100)
    with pytest.raises(AttachError, match="no longer the block"):
        attach(replace(block.name, inode=block.name.inode + 1))
    block.close()


def test_memory_that_is_lacking_is_an_error_and_not_a_bus_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, start: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = descriptors()
    with pytest.raises(WeightSyncError, match=r"cannot take 2097152 bytes of shared memory .* No space left"):
        SharedBlock(100)
    assert descriptors() == before


def test_a_source_keeps_no_weights_once_they_were_taken() -> None:
    """Their memory is the engine's, which may move them."""
    source, target = make_transport("ring"), make_transport("ring")
    values = torch.randn(64, 64)
    alive = weakref.ref(values)
    shard = WeightShard(name="w", box=Box.whole((64, 64)), tensor=values)
    handle = export(source, [shard], ["float32"])
    assert len(list(target.fetch(handle, [((64, 64), "float32")]))) == 1
    assert isinstance(source, RingTransport)
    assert source._streaming is not None
    source._streaming.join()
    del values, shard
    gc.collect()
    assert alive() is None
    source.close()
    target.close()


@pytest.mark.parametrize("name", [*COPYING, *BETWEEN_HOSTS])
def test_ends_of_different_wire_versions_refuse_each_other(name: str) -> None:
    source, target = make_transport(name), make_transport(name)
    shards = shards_of()
    handle = {**export(source, shards, ["float32"] * 5), "wire_version": 1}
    with pytest.raises(WeightSyncError, match="the source speaks version 1 of the wire, this end version 4"):
        target.fetch(handle, [(s.box.size, "float32") for s in shards])
    source.close()


def test_a_bucket_over_the_limit_is_refused_before_memory_is_taken() -> None:
    handle = announcement(1 << 33, [])
    with pytest.raises(WeightSyncError, match="over the limit of 4294967296"):
        make_transport("process_group").fetch(handle, [((1 << 33,), "uint8")])


def test_weights_in_shared_memory_are_read_where_they_are() -> None:
    source, target = make_transport("ring"), make_transport("ring")
    first, second = share([torch.randn(8, 6), torch.randn(5)])
    shards = [
        WeightShard(name="w", box=Box((2, 1), (4, 3)), tensor=first[2:6, 1:4]),
        WeightShard(name="b", box=Box.whole((5,)), tensor=second),
    ]
    metas = [((4, 3), "float32"), ((5,), "float32")]
    came = list(target.fetch(export(source, shards, ["float32"] * 2), metas))
    assert torch.equal(came[0], first[2:6, 1:4])
    assert torch.equal(came[1], second)
    first.add_(1)
    assert torch.equal(came[0], first[2:6, 1:4])
    again = list(target.fetch(export(source, shards, ["float32"] * 2), metas))
    assert again[1].data_ptr() == came[1].data_ptr()
    came[1].zero_()
    assert second.count_nonzero() == 5


def test_weights_in_shared_memory_of_another_dtype_than_asked_for_are_sent() -> None:
    (shared,) = share([torch.randn(8, 6)])
    shard = WeightShard(name="w", box=Box.whole((8, 6)), tensor=shared)
    source, target = make_transport("ring"), make_transport("ring")
    (came,) = target.fetch(export(source, [shard], ["bfloat16"]), [((8, 6), "bfloat16")])
    assert torch.equal(came, shared.to(torch.bfloat16))


def test_a_new_block_of_weights_takes_the_place_of_the_old_one() -> None:
    source, target = make_transport("ring"), make_transport("ring")
    for value in (1.0, 2.0, 3.0):
        (shared,) = share([torch.full((100,), value)])
        shard = WeightShard(name="w", box=Box.whole((100,)), tensor=shared)
        (came,) = target.fetch(export(source, [shard], ["float32"]), [((100,), "float32")])
        assert came.unique().tolist() == [value]
        del came, shard, shared
        gc.collect()
    target.close()
