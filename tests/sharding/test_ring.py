"""The ring of shared memory between two processes: its order, its errors, and what is left when an end is gone."""

import gc
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from sharding_cases import export

from rlsdk.interfaces import Box, WeightShard, WeightSyncError
from rlsdk.kit.ranks.shared_memory import AttachError
from rlsdk.sharding.transports.host_memory import SharedMemoryTransport
from rlsdk.sharding.transports.ring import NUM_SLOTS, RingClosedError, RingReader, RingWriter

SLOT = 4096
WAIT_S = 60.0


@pytest.fixture
def ends() -> Iterator[tuple[RingWriter, RingReader]]:
    writer = RingWriter(SLOT)
    reader = RingReader(writer.announcement())
    yield writer, reader
    reader.close()
    writer.close()


def write(writer: RingWriter, stream: int, value: int) -> None:
    writer.next_slot(WAIT_S).fill_(value)
    writer.post(stream, value)


def test_slots_come_in_order_however_often_the_ring_goes_round(ends: tuple[RingWriter, RingReader]) -> None:
    writer, reader = ends
    count = 5 * NUM_SLOTS + 1
    thread = threading.Thread(target=lambda: [write(writer, 1, value) for value in range(count)])
    thread.start()
    for value in range(count):
        slot, checksum = reader.take(1, WAIT_S)
        assert (checksum, slot.unique().tolist(), len(slot)) == (value, [value], SLOT)
        reader.free()
    thread.join()


def test_a_slot_is_not_filled_again_before_it_was_freed(ends: tuple[RingWriter, RingReader]) -> None:
    writer, reader = ends
    for value in range(NUM_SLOTS):
        write(writer, 1, value)
    with pytest.raises(RingClosedError):
        writer.next_slot(0)
    first, _ = reader.take(1, WAIT_S)
    with pytest.raises(RingClosedError):
        writer.next_slot(0)
    assert first[0] == 0
    reader.free()
    write(writer, 1, 77)
    assert first[0] == 77


def test_what_is_left_of_a_stream_that_was_given_up_is_passed_over(ends: tuple[RingWriter, RingReader]) -> None:
    writer, reader = ends
    write(writer, 1, 5)
    write(writer, 1, 6)
    write(writer, 2, 7)
    assert reader.take(2, WAIT_S)[1] == 7


def test_an_error_of_the_source_arrives_in_its_own_words(ends: tuple[RingWriter, RingReader]) -> None:
    writer, reader = ends
    writer.post_error(1, "LayoutError: no such tensor")
    with pytest.raises(WeightSyncError, match=r"^LayoutError: no such tensor$"):
        reader.take(1, WAIT_S)


def test_a_source_that_sends_nothing_is_an_error_at_the_deadline(ends: tuple[RingWriter, RingReader]) -> None:
    with pytest.raises(WeightSyncError, match=r"sent nothing for 0\.1 s"):
        ends[1].take(1, 0.1)


def test_a_writer_learns_that_the_reader_is_gone(ends: tuple[RingWriter, RingReader]) -> None:
    writer, reader = ends
    write(writer, 1, 0)
    assert writer.alive
    reader.close()
    assert not writer.alive
    for _ in range(NUM_SLOTS - 1):
        writer.next_slot(WAIT_S)
        with pytest.raises(RingClosedError):
            writer.post(1, 0)


def test_a_writer_that_waits_is_ended_by_close(ends: tuple[RingWriter, RingReader]) -> None:
    writer = ends[0]
    for value in range(NUM_SLOTS):
        write(writer, 1, value)
    ended = threading.Event()

    def wait() -> None:
        with pytest.raises(RingClosedError):
            writer.next_slot(WAIT_S)
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    writer.close()
    assert ended.wait(WAIT_S)


@pytest.mark.parametrize("field", ["path", "credits", "filled"])
def test_a_ring_that_cannot_be_opened_is_said_to_be_so(field: str) -> None:
    writer = RingWriter(SLOT)
    gc.collect()  # what other tests have left
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(AttachError, match="cannot open"):
        RingReader({**writer.announcement(), field: "/proc/0/fd/0"})
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("field", ["inode", "credits_inode", "filled_inode"])
def test_a_path_that_leads_elsewhere_by_now_is_refused(field: str) -> None:
    writer = RingWriter(SLOT)
    announced = writer.announcement()
    with pytest.raises(AttachError, match="no longer the"):
        RingReader({**announced, field: announced[field] + 1})


def stream_forever(pipe: Connection) -> None:
    """Body of a source process that has far more to send than the ring holds, and waits for its reader."""
    shards = [WeightShard(name="w", box=Box.whole((n,)), tensor=torch.ones(n)) for n in [1 << 18] * 40]
    transport = SharedMemoryTransport()
    pipe.send(export(transport, shards, ["float32"] * 40))
    pipe.recv()


METAS = [((1 << 18,), "float32")] * 40


def with_source(body: Callable[[Mapping[str, Any], Any], None]) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=stream_forever, args=(theirs,), daemon=True)
    process.start()
    try:
        assert ours.poll(120)
        body(ours.recv(), process)
    finally:
        process.kill()
        process.join()


def test_a_source_that_is_killed_in_the_middle_is_an_error_and_leaves_nothing() -> None:
    def check(handle: Mapping[str, Any], process: Any) -> None:
        descriptors = len(os.listdir("/proc/self/fd"))
        target = SharedMemoryTransport()
        came = target.fetch(handle, METAS)
        assert next(came).sum() == 1 << 18
        process.kill()
        process.join()
        with pytest.raises(WeightSyncError, match="the source is gone"):
            list(came)
        del came
        target.close()
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) <= descriptors

    with_source(check)
    gc.collect()
    with open("/proc/self/maps") as maps:
        assert not any("rlsdk-" in line for line in maps)


def test_a_target_that_gives_up_lets_the_source_go_on_with_the_next() -> None:
    shards = [WeightShard(name="w", box=Box.whole((n,)), tensor=torch.full((n,), 3.0)) for n in [1 << 18] * 40]
    source, target = SharedMemoryTransport(), SharedMemoryTransport()
    came = target.fetch(export(source, shards, ["float32"] * 40), METAS)
    next(came)
    target.close()
    again = target.fetch(export(source, shards, ["float32"] * 40), METAS)
    assert [int(tensor.sum()) for tensor in again] == [3 << 18] * 40
    source.close()
    target.close()


def test_buckets_that_are_asked_for_ahead_come_one_after_the_other() -> None:
    source, target = SharedMemoryTransport(), SharedMemoryTransport()
    metas = METAS[:10]
    handles = [
        export(
            source,
            [WeightShard(name="w", box=Box.whole(s), tensor=torch.full(s, k)) for s, _ in metas],
            ["float32"] * 10,
        )
        for k in (1.0, 2.0, 3.0)
    ]
    for k, handle in enumerate(handles, start=1):
        assert [tensor.mean() for tensor in target.fetch(handle, metas)] == [k] * 10
    source.close()
    target.close()
