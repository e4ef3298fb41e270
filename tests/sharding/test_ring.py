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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sharding_cases import export

from rlsdk.interfaces import Box, WeightShard, WeightSyncError
from rlsdk.kit.ranks.shared_memory import AttachError
from rlsdk.sharding.transports.ring import RingClosedError, RingReader, RingWriter
from rlsdk.sharding.transports.ring_memory import OPENERS, HostMemory, RingMemory, open_memory
from rlsdk.sharding.transports.ring_transport import RingTransport

SLOT = 4096
NUM_SLOTS = 4
WAIT_S = 20.0


@pytest.fixture
def ends() -> Iterator[tuple[RingWriter, RingReader]]:
    writer = RingWriter(HostMemory(NUM_SLOTS, SLOT))
    reader = RingReader(writer.export())
    yield writer, reader
    reader.close()
    writer.close()


def write(writer: RingWriter, stream: int, value: int) -> None:
    writer.next_slot(WAIT_S).fill_(value % 256)
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
    with pytest.raises(RingClosedError):
        writer.next_slot(WAIT_S)


def test_a_writer_learns_that_the_reader_is_gone_while_it_fills_a_slot(ends: tuple[RingWriter, RingReader]) -> None:
    writer, reader = ends
    for value in range(NUM_SLOTS):
        write(writer, 1, value)
    reader.take(1, WAIT_S)
    reader.free()
    writer.next_slot(WAIT_S)
    reader.close()
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
    writer = RingWriter(HostMemory(NUM_SLOTS, SLOT))
    gc.collect()  # what other tests have left
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(AttachError, match="cannot open"):
        RingReader({**writer.export(), field: "/proc/0/fd/0"})
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("field", ["inode", "credits_inode", "filled_inode"])
def test_a_path_that_leads_elsewhere_by_now_is_refused(field: str) -> None:
    writer = RingWriter(HostMemory(NUM_SLOTS, SLOT))
    announced = writer.export()
    with pytest.raises(AttachError, match="no longer the"):
        RingReader({**announced, field: announced[field] + 1})


def joined(count: int, memory: RingMemory | None = None) -> tuple[RingWriter, list[RingReader]]:
    writer = RingWriter(memory or HostMemory(NUM_SLOTS, SLOT), count)
    return writer, [RingReader(writer.export(reader)) for reader in range(count)]


def test_a_slot_is_filled_again_when_the_last_reader_has_returned_it() -> None:
    writer, (quick, slow) = joined(2)
    for value in range(NUM_SLOTS):
        write(writer, 1, value)
    quick.take(1, WAIT_S)
    quick.free()
    with pytest.raises(RingClosedError):
        writer.next_slot(0)
    slot, _ = slow.take(1, WAIT_S)
    assert slot[0] == 0
    slow.free()
    write(writer, 1, 77)
    assert slot[0] == 77


def test_a_reader_that_is_gone_holds_the_others_up_no_longer() -> None:
    writer, (gone, left) = joined(2)
    write(writer, 1, 0)
    gone.close()
    assert not writer.alive
    for value in range(1, 3 * NUM_SLOTS):
        assert left.take(1, WAIT_S)[1] == value - 1
        left.free()
        write(writer, 1, value)
    left.close()
    with pytest.raises(RingClosedError):
        writer.next_slot(WAIT_S)


def test_a_late_reader_gets_everything_from_the_first_slot_on() -> None:
    writer = RingWriter(HostMemory(NUM_SLOTS, SLOT), 2)
    early = RingReader(writer.export(0))
    for value in range(NUM_SLOTS):
        write(writer, 1, value)
        assert early.take(1, WAIT_S)[1] == value
        early.free()
    with pytest.raises(RingClosedError):
        writer.next_slot(0)
    late = RingReader(writer.export(1))
    for value in range(NUM_SLOTS):
        slot, sent = late.take(1, WAIT_S)
        assert (sent, slot.unique().tolist()) == (value, [value])
        late.free()


def test_an_error_reaches_every_reader() -> None:
    writer, readers = joined(3)
    writer.post_error(1, "LayoutError: no such tensor")
    for reader in readers:
        with pytest.raises(WeightSyncError, match=r"^LayoutError: no such tensor$"):
            reader.take(1, WAIT_S)


def test_a_reader_that_left_before_it_attached_is_waited_for_no_longer() -> None:
    """It asked for another transport."""
    writer = RingWriter(HostMemory(NUM_SLOTS, SLOT), 2)
    stays = RingReader(writer.export(0))
    for value in range(2 * NUM_SLOTS):
        if value == NUM_SLOTS:
            with pytest.raises(RingClosedError):
                writer.next_slot(0.1)
            writer.leave(1)
        write(writer, 1, value)
        assert stays.take(1, WAIT_S)[1] == value
        stays.free()


class FakeDevice(RingMemory):
    """A device's memory as far as its protocol goes: opened by a handle, by another process than its owner. Its bytes
    are in shared memory of the host."""

    kind = "fake device"

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        super().__init__(num_slots, slot_bytes)
        self._host = HostMemory(num_slots, slot_bytes)
        self.finished = 0

    @property
    def data(self) -> torch.Tensor:
        return self._host.data

    def export(self) -> dict[str, Any]:
        return {"uuid": "GPU-5d2f", "owner": os.getpid(), "memory": self._host.export()}

    def finish(self) -> None:
        self.finished += 1


def open_fake(exported: Mapping[str, Any], device: torch.device | None) -> torch.Tensor:
    if exported["uuid"] != "GPU-5d2f":
        raise AttachError("no such device")
    return open_memory({**exported["memory"], "kind": "host"}, device)


@pytest.fixture(params=["host", "device"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], RingMemory]:
    monkeypatch.setitem(OPENERS, FakeDevice.kind, open_fake)
    return HostMemory if request.param == "host" else FakeDevice


Step = tuple[str, int]


STEPS = ["write", "write", "attach", "take", "take", "free", "close", "leave"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_readers=st.integers(1, 4),
    num_slots=st.integers(2, 5),
    steps=st.lists(
        st.tuples(st.sampled_from(STEPS), st.integers(0, 3)),
        max_size=80,
    ),
)
def test_whatever_readers_do_each_gets_all_slots_in_order_and_none_is_overwritten(
    memory: Callable[[int, int], RingMemory], num_readers: int, num_slots: int, steps: list[Step]
) -> None:
    """Against a model in plain numbers: per reader, what it has taken and returned."""
    slots = memory(num_slots, 256)
    writer = RingWriter(slots, num_readers)
    readers: dict[int, RingReader] = {}
    taken, returned, gone = [0] * num_readers, [0] * num_readers, set[int]()
    held: list[list[tuple[torch.Tensor, int]]] = [[] for _ in range(num_readers)]
    written = 0
    for what, which in steps:
        at = which % num_readers
        if what == "write":
            left = [reader for reader in range(num_readers) if reader not in gone]
            free = bool(left) and all(written - returned[reader] < num_slots for reader in left)
            if free:
                write(writer, 1, written)
                written += 1
            else:
                with pytest.raises(RingClosedError):
                    writer.next_slot(0)
        elif what == "attach" and at not in readers and at not in gone:
            readers[at] = RingReader(writer.export(at))
        elif what == "take" and at in readers and at not in gone:
            if taken[at] == written:
                with pytest.raises(WeightSyncError, match="sent nothing"):
                    readers[at].take(1, 0)
            else:
                slot, sent = readers[at].take(1, 0)
                assert sent == taken[at]
                held[at].append((slot, sent % 256))
                taken[at] += 1
        elif what == "free" and held[at]:
            held[at].pop(0)
            readers[at].free()
            returned[at] += 1
        elif what == "close" and at in readers and at not in gone:
            readers[at].close()
            held[at].clear()
            gone.add(at)
        elif what == "leave" and at not in readers:
            writer.leave(at)
            gone.add(at)
        for slot, value in (entry for mine in held for entry in mine):
            assert slot.unique().tolist() == [value]
    assert slots.data.data_ptr() == writer.memory.data.data_ptr()
    assert len(slots.data) >= num_slots * 256


def stream_forever(pipe: Connection) -> None:
    """Body of a source process that has far more to send than the ring holds, and waits for its reader."""
    shards = [WeightShard(name="w", box=Box.whole((n,)), tensor=torch.ones(n)) for n in [1 << 18] * 40]
    transport = RingTransport()
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
        target = RingTransport()
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
    source, target = RingTransport(), RingTransport()
    came = target.fetch(export(source, shards, ["float32"] * 40), METAS)
    next(came)
    target.close()
    again = target.fetch(export(source, shards, ["float32"] * 40), METAS)
    assert [int(tensor.sum()) for tensor in again] == [3 << 18] * 40
    source.close()
    target.close()


def test_buckets_that_are_asked_for_ahead_come_one_after_the_other() -> None:
    source, target = RingTransport(), RingTransport()
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
