"""Tensors in memory that other processes can map."""

import gc
import multiprocessing
import os
from multiprocessing.connection import Connection

import torch

from rlsdk.kit.ranks.shared_memory import BlockName, attach, find_block, share


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_shared_tensors_have_the_same_values_and_say_where_they_are() -> None:
    given = [torch.randn(5, 3), torch.arange(7), torch.randn(()), torch.empty(0, 4), torch.randn(4, 4).t()]
    shared = share(given)
    for before, after in zip(given, shared, strict=True):
        assert after.dtype == before.dtype
        assert torch.equal(after, before)
        assert after.is_contiguous()
        assert after.untyped_storage().nbytes() == before.numel() * before.element_size()
    place = find_block(shared[1][2:])
    assert place is not None
    name, start = place
    assert attach(name)[start : start + 40].view(torch.int64).tolist() == [2, 3, 4, 5, 6]
    assert find_block(given[0]) is None


def test_memory_and_descriptor_go_with_the_last_tensor() -> None:
    gc.collect()
    before = descriptors()
    shared = share([torch.ones(10), torch.ones(20)])
    part = shared[1][:3]
    del shared
    gc.collect()
    assert find_block(part) is not None
    assert descriptors() > before
    del part
    gc.collect()
    assert descriptors() == before


def test_what_a_private_view_writes_the_owner_does_not_see() -> None:
    (shared,) = share([torch.zeros(4)])
    place = find_block(shared)
    assert place is not None
    view = attach(place[0], private=True)[place[1] : place[1] + 16].view(torch.float32)
    shared.fill_(3.0)
    assert view.tolist() == [3.0] * 4
    view.fill_(7.0)
    assert shared.tolist() == [3.0] * 4


def _sum_of(pipe: Connection) -> None:
    name, start, count = pipe.recv()
    pipe.send(float(attach(name, private=True)[start : start + 4 * count].view(torch.float32).sum()))


def test_another_process_reads_what_was_written_after_it_was_started() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_sum_of, args=(theirs,), daemon=True)
    process.start()
    try:
        (shared,) = share([torch.zeros(1000)])
        shared.fill_(0.5)
        place = find_block(shared)
        assert place is not None
        assert isinstance(place[0], BlockName)
        ours.send((*place, 1000))
        assert ours.poll(120)
        assert ours.recv() == 500.0
    finally:
        process.kill()
        process.join()
