"""How many samples a replica has under way: the control alone, then a client and a replica with a knee, in virtual
time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace

import pytest
from fakes import FakeReplica, output_of
from hypothesis import given
from hypothesis import strategies as st

from rlsdk.interfaces import GenerationRequest, SamplingParams
from rlsdk.rollouts import Collected, GenerationClient, PackedOutputs
from rlsdk.rollouts.client import client, replica_state
from rlsdk.rollouts.client.concurrency import EXPIRY, ConcurrencyControl, ConcurrencyMeter, Window, levels_up_to

MOST = 256


def drive(control: ConcurrencyControl, rate: Callable[[int], float], windows: int, noise: float = 0.0) -> list[int]:
    """The limits that were tried; `rate`: tokens per second by limit."""
    draw, tried = random.Random(0), []
    for _ in range(windows):
        tried.append(control.limit)
        shaken = rate(control.limit) * (1 + noise * draw.uniform(-1, 1))
        control.observe(Window(seconds=10.0, tokens=round(10.0 * shaken)))
    return tried


def knee(at: int, beyond: float = 0.0) -> Callable[[int], float]:
    """Throughput grows with the samples up to the knee, and falls by `beyond` for each multiple of it after that."""
    return lambda limit: 100.0 * min(limit, at) * (1 - beyond * max(limit / at - 1, 0) / (1 + limit / at))


@given(most=st.integers(1, 5000))
def test_levels_reach_from_1_to_the_most_in_steps_of_at_most_a_half(most: int) -> None:
    levels = levels_up_to(most)
    assert levels[0] == 1
    assert levels[-1] == most
    assert all(low < high <= max(low * 1.7, low + 1) for low, high in pairwise(levels))


@given(
    at=st.integers(2, MOST),
    beyond=st.sampled_from([0.0, 0.3, 0.9]),
    noise=st.sampled_from([0.0, 0.004]),
)
def test_it_settles_at_the_knee_from_above(at: int, beyond: float, noise: float) -> None:
    """The lowest level that is not below the knee; of its neighbours it only makes sure now and then."""
    tried = drive(ConcurrencyControl(MOST), knee(at, beyond), 120, noise)
    wanted = min(level for level in levels_up_to(MOST) if level >= at)
    rates = [knee(at, beyond)(limit) for limit in tried[40:]]
    assert max(set(tried[40:]), key=tried[40:].count) in (wanted, max(n for n in levels_up_to(MOST) if n < wanted))
    assert sum(rates) / len(rates) >= 0.93 * max(knee(at, beyond)(level) for level in levels_up_to(MOST))


@given(st.lists(st.tuples(st.floats(0.1, 100), st.integers(0, 10**6), st.booleans()), max_size=80), st.integers(1, 600))
def test_whatever_comes_the_limit_stays_in_its_bounds_and_moves_by_one_level(
    reports: list[tuple[float, int, bool]], most: int
) -> None:
    control, levels = ConcurrencyControl(most), levels_up_to(most)
    for seconds, tokens, full in reports:
        before = levels.index(control.limit)
        control.observe(Window(seconds=seconds, tokens=tokens, full=full))
        assert abs(levels.index(control.limit) - before) <= 1
        assert not full or control.limit < levels[before] or before == 0


def test_a_knee_that_moves_is_followed_both_ways() -> None:
    control = ConcurrencyControl(MOST)
    most_used = [max(set(late), key=late.count) for late in (
        drive(control, knee(at), 8 * EXPIRY)[-2 * EXPIRY :] for at in (30, 170, 30)
    )]  # fmt: skip
    assert most_used == [34, 171, 34]


def test_a_level_at_which_memory_was_full_is_left_at_once_and_tried_again_later() -> None:
    control, tried = ConcurrencyControl(MOST), []
    for _ in range(200):
        tried.append(control.limit)
        control.observe(Window(seconds=1.0, tokens=control.limit, full=control.limit > 60))
    assert tried[:6] == [256, 171, 114, 76, 51, 34]
    full = [at for at, limit in enumerate(tried) if limit > 60]
    assert len(full) <= 4 + len(tried) // EXPIRY + 1
    assert full[-1] > 150
    assert tried.count(51) > 150


def test_where_more_always_helps_little_is_given_away() -> None:
    """A decoding step of 8 ms plus 40 microseconds a sample: the throughput has no knee."""
    rate = lambda limit: limit / (8e-3 + 40e-6 * limit)  # noqa: E731
    tried = drive(ConcurrencyControl(2048), rate, 200)
    assert sum(map(rate, tried[40:])) / len(tried[40:]) >= 0.93 * rate(2048)


def test_only_what_happens_while_requests_wait_counts() -> None:
    meter = ConcurrencyMeter(64)
    for at in range(100):
        meter.report(float(at), tokens=64 * at, samples=64, running=64, waiting=at % 2 == 0, used=None)
    assert meter.limit == 64
    for at in range(100, 103):
        meter.report(float(at), tokens=64 * at, samples=64, running=64, waiting=True, used=None)
    assert meter.limit == 43


def test_a_window_begins_when_no_more_run_than_may() -> None:
    """Behind a lower limit, samples of the higher one are still under way, and their throughput is not that of it."""
    meter = ConcurrencyMeter(64)
    for at in range(2):
        meter.report(float(at), tokens=64 * at, samples=64, running=64, waiting=True, used=None)
    for at in range(2, 20):
        meter.report(float(at), tokens=10**6 * at, samples=64, running=50, waiting=True, used=None)
    assert meter.limit == 43


class KneeReplica(FakeReplica):
    """Decodes all that it has at once; past `knee` samples a decoding step takes longer. Its time is virtual."""

    def __init__(self, name: str, clock: list[float], knee: int) -> None:
        super().__init__(name, max_running=MOST)
        self.clock, self.knee, self.decoded = clock, knee, 0
        self.left: dict[tuple[str, int], int] = {}
        self.seen: list[int] = []

    async def submit(self, requests: Sequence[GenerationRequest]) -> None:
        await super().submit(requests)
        for request in requests:
            self.left |= {(request.request_id, at): 4 + int(request.request_id) * 7 % 9 for at in range(request.n)}

    async def collect(self, wait_s: float) -> Collected:
        await asyncio.sleep(0)
        self.seen.append(len(self.waiting))
        self.clock[0] += 0.02 * max(len(self.waiting) / self.knee, 1.0)
        self.decoded += len(self.waiting)
        done = []
        for request, index in self.waiting:
            key = request.request_id, index
            self.left[key] -= 1
            if not self.left[key]:
                done.append((request, index))
        self.waiting = [sample for sample in self.waiting if self.left[sample[0].request_id, sample[1]]]
        outputs = PackedOutputs.pack([output_of(request, index) for request, index in done])
        return Collected(outputs=outputs, num_decoded=self.decoded)


def test_a_client_finds_the_knee_of_its_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """And all samples come, as ever."""
    clock = [0.0]
    for module in (client, replica_state):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    replica = KneeReplica("knee", clock, knee=40)

    async def ask() -> tuple[int, float]:
        made = GenerationClient([replica], progress_s=1e9, adapts=True)
        running = asyncio.create_task(made.run())
        futures = [
            future
            for at in range(8000)
            for future in made.generate(
                GenerationRequest(
                    request_id=str(at), prompt_ids=(1,), sampling=SamplingParams(max_tokens=8, seed=at), n=1
                )
            ).values()
        ]
        found = await asyncio.gather(*futures)
        running.cancel()
        return len(found), made.concurrency()

    count, limit = asyncio.run(ask())
    assert count == 8000
    assert limit in (34, 51)
    settled = replica.seen[len(replica.seen) // 3 : -20]
    assert 30 <= sum(settled) / len(settled) <= 60
    assert replica.seen[5] > 200
