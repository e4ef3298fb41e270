"""Staleness and the split of devices, simulated; and how many events the state machine takes.

`python -m benchmarks.schedule_simulation` prints the table for 1,024 devices and a long tail, a setting like those that
others have published, the state machine's events a second, and its memory with 262,144 requests in flight.
"""

from __future__ import annotations

import time
import tracemalloc
from collections import deque

from rlsdk.cli.preparation.plan_schedule import show_rows
from rlsdk.planning.rates import Rates
from rlsdk.planning.splits import Workload, compare, log_normal_lengths
from rlsdk.rollouts import Finished, Publish, Published, Schedule, Start, Train, Updated
from rlsdk.views.terminal import SafeConsole

LARGE = Workload(
    devices=1024,
    groups_per_step=1024,
    samples_per_group=16,
    lengths=log_normal_lengths(middle=2000, p99=30_000, most=32_768, count=1 << 16),
)
"""Median 2k tokens, 99th percentile 30k."""
LARGE_RATES = Rates(
    decode_s=8e-3, decode_s_per_sample=40e-6, train_tokens_per_s=4000, sync_s=3.0, switch_s=15.0, max_running=256
)
"""A model of 7 billion parameters: 8 ms a decoding step, 18 ms with 256 samples; log-probs and update at 40 % of
400 teraflops, a third of it for log-probs."""
PUBLISHED = Workload(
    devices=128,
    groups_per_step=512,
    samples_per_group=16,
    lengths=log_normal_lengths(middle=4000, p99=28_000, most=28_672, count=1 << 16, seed=1),
)
"""As the fully asynchronous run of Qwen2.5-7B on 128 devices (512 prompts x 16, 28k tokens)."""
PUBLISHED_RATES = Rates(
    decode_s=8e-3, decode_s_per_sample=60e-6, train_tokens_per_s=3000, sync_s=5.0, switch_s=20.0, max_running=256
)


def events_per_second(groups_per_step: int = 1024, steps: int = 200) -> float:
    """Of the state machine alone, `finish` order at staleness 4."""
    schedule = Schedule(groups_per_step=groups_per_step, last_step=steps, max_staleness=4, order="finish", drains=False)
    commands, running, count = deque(schedule.begin()), deque[int](), 0
    start = time.perf_counter()
    while commands or running:
        while commands:
            match commands.popleft():
                case Publish(step):
                    commands.extend(schedule.handle(Published(step)))
                case Start(_, groups):
                    running.extend(groups)
                case Train(step, _):
                    commands.extend(schedule.handle(Updated(step)))
            count += 1
        if running:
            commands.extend(schedule.handle(Finished(running.popleft())))
            count += 1
    return count / (time.perf_counter() - start)


def bytes_in_flight(samples: int = 262_144, samples_per_group: int = 1) -> int:
    """Memory of the state machine with so many requests under way, a group each."""
    tracemalloc.start()
    schedule = Schedule(
        groups_per_step=samples // samples_per_group // 2, last_step=10, max_staleness=1, order="finish", drains=False
    )
    schedule.begin()
    schedule.handle(Published(0))
    assert schedule.running == samples // samples_per_group
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used


def main() -> None:
    console = SafeConsole(highlight=False, width=120)
    console.print(f"state machine: {events_per_second():,.0f} events a second")
    console.print(f"memory with 262,144 groups in flight: {bytes_in_flight() / 2**20:.0f} MiB\n")
    for name, work, rates in (
        ("1,024 devices, long tail", LARGE, LARGE_RATES),
        ("128 devices, 28k tokens", PUBLISHED, PUBLISHED_RATES),
    ):
        start = time.process_time()
        show_rows(compare(work, rates), console, title=name)
        console.print(f"simulated in {time.process_time() - start:.1f} s of one processor\n")


if __name__ == "__main__":
    main()
