"""What a training step costs besides the engines: `python -m benchmarks.controller_overhead [--json PATH]`.

Runs the calls of one step (generate on every rank, log-probs with rows rejoined, mini-batch updates) on real Ray
workers whose hosts compute nothing, so all the time is the framework's: splitting, sending, copying, waiting, joining.
Up to eight processes; more workers than that are several ranks to a process, which the controller cannot tell apart.

Beside it stands the least that Ray itself takes: the same number of calls with the same bytes on bare actors, which
check, order, balance and join nothing.

Copies are measured, not assumed: a tensor that does not lie in the object store's shared memory was copied.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import torch
from rich.console import Console
from rich.table import Table

from rlsdk.cluster import Cluster, Join, PlacementSpec, PoolSpec, Split, WorkerGroup, dispatch
from rlsdk.cluster.batches.balance import balanced_partition
from rlsdk.cluster.group import Member
from rlsdk.interfaces import Batch, GenerationRequest, Parallel, RankContext, SamplingParams

HOST = "benchmarks.controller_overhead:IdleHost"
PROCESSES = 8
MAX_WORKERS = 64
SAMPLES_PER_PROMPT = 8
BATCHES = ((64, 64), (256, 64), (512, 256), (1024, 256), (1024, 1024), (1024, 4096))
"""Samples and tokens of a sample, prompt included."""
WORKERS = (1, 2, 4, 8, 16, 32, 64)
PHASES = ("generate", "put", "log_probs", "update")


class IdleHost:
    """Answers at once, with results of the right shape and size."""

    def __init__(self, ctx: RankContext) -> None:
        self.copied_bytes: int | None = None

    @dispatch(split=Split.ALL, join=Join.LIST)
    def generate(self, requests: Sequence[GenerationRequest]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        total = sum(request.n * request.sampling.max_tokens for request in requests)
        return np.zeros(total, np.int64), np.zeros(total, np.float32)

    @dispatch(split=Split.DATA, join=Join.ROWS)
    def forward(self, batch: Batch) -> Batch:
        self.count(batch)
        return batch.keep(()).with_tokens(old_log_probs=torch.zeros(batch.num_tokens))

    @dispatch(split=Split.DATA, join=Join.FIRST)
    def update(self, batch: Batch) -> float:
        self.count(batch)
        return 0.0

    def count(self, batch: Batch) -> None:
        """Looking through the memory map takes longer than the step, so only the step that is not timed does it."""
        if self.copied_bytes is not None:
            self.copied_bytes += copied_bytes(batch)

    def start_counting(self) -> None:
        self.copied_bytes = 0

    def stop_counting(self) -> int:
        taken, self.copied_bytes = self.copied_bytes or 0, None
        return taken


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured setting; seconds are medians over repetitions."""

    samples: int
    tokens_per_sample: int
    workers: int
    updates: int
    batch_mb: float
    seconds: float
    """Of a whole step, wall clock."""
    cpu_seconds: float
    """Of a step, all processes together."""
    controller_cpu_seconds: float
    """Of a step, this process alone: what does not spread over machines."""
    ray_seconds: float
    """Of the same calls on bare Ray actors, wall clock."""
    phase_seconds: dict[str, float]
    put_copies: float
    """Bytes written to the object store by `Cluster.put`, per byte of the batches put."""
    worker_copies: float
    """Bytes that workers copied out of the object store, per byte of the batches sent."""
    result_copies: float
    """Bytes that the controller copied to join results, per byte of result."""


def copied_bytes(batch: Batch) -> int:
    """Bytes of a batch's tensors that are not views of the object store."""
    shared = shared_memory()
    tensors = [batch.lengths, *batch.tokens.values(), *batch.rows.values()]
    return sum(t.nbytes for t in tensors if not any(low <= t.data_ptr() < high for low, high in shared))


def shared_memory() -> list[tuple[int, int]]:
    """Address ranges of this process that are the object store's."""
    with open("/proc/self/maps") as maps:
        lines = [line for line in maps if "/dev/shm" in line or "plasma" in line]
    spans = [line.split(" ", 1)[0].split("-") for line in lines]
    return [(int(low, 16), int(high, 16)) for low, high in spans]


def make_batch(samples: int, tokens_per_sample: int) -> Batch:
    """A batch as the update sees it, with random lengths that average three quarters of the longest."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(tokens_per_sample // 2, tokens_per_sample + 1, (samples,), generator=generator)
    total = int(lengths.sum())
    floats = {name: torch.zeros(total) for name in ("old_log_probs", "advantages", "loss_weight")}
    return Batch(
        lengths=lengths,
        tokens={
            "input_ids": torch.zeros(total, dtype=torch.int64),
            "response_mask": torch.zeros(total, dtype=torch.bool),
            **floats,
        },
        rows={"row_id": torch.arange(samples)},
    )


def make_requests(samples: int, tokens_per_sample: int) -> list[GenerationRequest]:
    half = tokens_per_sample // 2
    sampling = SamplingParams(max_tokens=half)
    return [
        GenerationRequest(request_id=str(at), prompt_ids=tuple(range(half)), sampling=sampling, n=SAMPLES_PER_PROMPT)
        for at in range(max(1, samples // SAMPLES_PER_PROMPT))
    ]


def merged_group(cluster: Cluster, groups: Sequence[WorkerGroup], workers: int) -> WorkerGroup:
    """The first ranks of several groups as one data-parallel group, spread over processes first."""
    members = [member for group in groups for member in group.members][:workers]
    ranks = [
        Member(
            worker=member.worker,
            ctx=replace(member.ctx, rank=rank, world_size=workers),
            parallel=Parallel(dp_rank=rank, dp_size=workers),
        )
        for rank, member in enumerate(members)
    ]
    return WorkerGroup("fake", ranks, groups[0].methods, put=cluster.put, timeout_s=60)


class Step:
    """The calls of one step, timed by phase."""

    def __init__(self, cluster: Cluster, group: WorkerGroup, batch: Batch, tokens: int, updates: int) -> None:
        self.cluster = cluster
        self.group = group
        self.batch = batch
        self.requests = make_requests(batch.num_rows, tokens)
        self.mini_batches = [torch.arange(at, batch.num_rows, updates) for at in range(updates)]
        self.seconds = dict.fromkeys(PHASES, 0.0)

    def run(self) -> Batch:
        """Returns the joined log-probs."""
        with self.phase("generate"):
            costs = [len(request.prompt_ids) for request in self.requests]
            shares = balanced_partition(costs, self.group.world_size)
            self.group.run_each("generate", [([self.requests[at] for at in share],) for share in shares])
        with self.phase("put"):
            needed = self.cluster.put(self.batch.keep(("input_ids", "response_mask")))
            needed.stored()
        with self.phase("log_probs"):
            answer: Batch = self.group.run("forward", needed)
        with self.phase("put"):
            shared = self.cluster.put(self.batch)
            shared.stored()
        with self.phase("update"):
            waiting = [self.group.submit("update", shared.select(rows)) for rows in self.mini_batches]
            for pending in waiting:
                pending.result()
        return answer

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start


@ray.remote(num_cpus=0, max_concurrency=1)
class BareActor:
    """What is left of a worker without rlsdk."""

    def call(self, refs: Sequence[Any], share: Any, answer_floats: int) -> Any:
        for ref in refs:
            ray.get(ref)
        return np.zeros(answer_floats, np.float32)


class BareStep:
    """The calls of `Step`, in Ray's own words: rows are not cut, so every worker is sent the reference alone."""

    def __init__(self, actors: Sequence[Any], step: Step, workers: int) -> None:
        self.actors = [actors[at % len(actors)] for at in range(workers)]
        self.batch = {name: t.numpy() for name, t in step.batch.tokens.items()}
        self.shares = [step.requests[at::workers] for at in range(workers)]
        self.updates = len(step.mini_batches)
        self.share_tokens = step.batch.num_tokens // workers

    def run(self) -> None:
        ray.get([a.call.remote([], share, 3 * self.share_tokens)
                 for a, share in zip(self.actors, self.shares, strict=True)])  # fmt: skip
        needed = ray.put({name: self.batch[name] for name in ("input_ids", "response_mask")})
        np.concatenate(ray.get([a.call.remote([needed], None, self.share_tokens) for a in self.actors]))
        shared = ray.put(self.batch)
        ray.get([a.call.remote([shared], None, 1) for _ in range(self.updates) for a in self.actors])


def timed(run: Callable[[], object]) -> list[float]:
    """Seconds of each repetition: for about a second, at least three times."""
    walls = list[float]()
    while len(walls) < 3 or (sum(walls) < 1.0 and len(walls) < 50):
        start = time.perf_counter()
        run()
        walls.append(time.perf_counter() - start)
    return walls


def measure(
    cluster: Cluster,
    groups: Sequence[WorkerGroup],
    bare: Sequence[Any],
    samples: int,
    tokens: int,
    workers: int,
    updates: int = 4,
) -> Row:
    """A step, and the same calls on bare actors."""
    batch = make_batch(samples, tokens)
    group = merged_group(cluster, groups, workers)
    group.run("start_counting")
    answer = Step(cluster, group, batch, tokens, updates).run()
    copied = sum(group.run("stop_counting"))
    steps: list[Step] = []

    def step() -> None:
        steps.append(Step(cluster, group, batch, tokens, updates))
        steps[-1].run()

    cpu, own_cpu = process_tree_cpu(), time.process_time()
    walls = timed(step)
    own_cpu_seconds = (time.process_time() - own_cpu) / len(walls)
    cpu_seconds = (process_tree_cpu() - cpu) / len(walls)
    ray_walls = timed(BareStep(bare, steps[-1], workers).run)
    sent = batch.num_bytes + batch.keep(("input_ids", "response_mask")).num_bytes
    return Row(
        samples=samples,
        tokens_per_sample=tokens,
        workers=workers,
        updates=updates,
        batch_mb=batch.num_bytes / 1e6,
        seconds=statistics.median(walls),
        cpu_seconds=cpu_seconds,
        controller_cpu_seconds=own_cpu_seconds,
        ray_seconds=statistics.median(ray_walls),
        phase_seconds={name: statistics.median(step.seconds[name] for step in steps) for name in PHASES},
        put_copies=stored_bytes(cluster, batch) / batch.num_bytes,
        worker_copies=copied / sent,
        result_copies=copied_bytes(answer) / answer.num_bytes,
    )


def stored_bytes(cluster: Cluster, batch: Batch) -> int:
    """What a batch takes in the object store."""
    refs = [ref for ref, _ in cluster.put(batch).stored().pieces]
    return sum(int(found["object_size"]) for found in ray.experimental.get_object_locations(refs).values())


def process_tree_cpu() -> float:
    """CPU seconds so far of this process and all that it started."""
    me = psutil.Process()
    times = [process.cpu_times() for process in [me, *me.children(recursive=True)]]
    return float(sum(t.user + t.system for t in times))


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Slope of log seconds over log size: 1 is linear, 0 is flat."""
    x, y = [math.log(s) for s in sizes], [math.log(s) for s in seconds]
    slope, _ = statistics.linear_regression(x, y)
    return slope


def summarize(by_batch: Sequence[Row], by_workers: Sequence[Row]) -> dict[str, float]:
    """Linear fits of seconds a step: over bytes, and over workers."""
    per_mb, fixed = statistics.linear_regression([r.batch_mb for r in by_batch], [r.seconds for r in by_batch])
    per_worker, _ = statistics.linear_regression([r.workers for r in by_workers], [r.seconds for r in by_workers])
    large = by_batch[-3:]
    return {
        "seconds_fixed": fixed,
        "seconds_per_gb": per_mb * 1e3,
        "seconds_per_worker": per_worker,
        "exponent_of_bytes": exponent([r.batch_mb for r in large], [r.seconds for r in large]),
        "exponent_of_workers": exponent([r.workers for r in by_workers], [r.seconds for r in by_workers]),
    }


def table_of(title: str, rows: Sequence[Row]) -> Table:
    table = Table(title=title, title_justify="left")
    sizes = ("samples", "tokens", "workers", "batch MB")
    times = ("ms/step", "Ray alone", "CPU ms/step", "of controller", *PHASES)
    for name in (*sizes, *times, "copies: put", "workers", "result"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row.samples),
            str(row.tokens_per_sample),
            str(row.workers),
            f"{row.batch_mb:.1f}",
            f"{row.seconds * 1e3:.1f}",
            f"{row.ray_seconds * 1e3:.1f}",
            f"{row.cpu_seconds * 1e3:.1f}",
            f"{row.controller_cpu_seconds * 1e3:.1f}",
            *(f"{row.phase_seconds[name] * 1e3:.1f}" for name in PHASES),
            f"{row.put_copies:.2f}",
            f"{row.worker_copies:.2f}",
            f"{row.result_copies:.2f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("controller_overhead.json"), help="where to write the rows")
    parser.add_argument("--quick", action="store_true", help="small batches and few workers only")
    options = parser.parse_args()
    batches = BATCHES[:3] if options.quick else BATCHES
    workers = WORKERS[:4] if options.quick else WORKERS
    per_process = MAX_WORKERS // PROCESSES
    roles = [f"fake{number}" for number in range(per_process)]
    pool = PoolSpec(name="fake", devices_per_node=(PROCESSES,))
    start = time.perf_counter()
    with Cluster.start(
        PlacementSpec(pools=(pool,), roles=dict.fromkeys(roles, "fake")), timeout_s=120, preload=["torch"]
    ) as cluster:
        groups = [cluster.create_group(role, HOST) for role in roles]
        ready = time.perf_counter() - start
        actor_class: Any = BareActor  # what the decorator makes of it is unknown to type checkers
        bare = [actor_class.remote() for _ in range(PROCESSES)]
        ray.get([actor.call.remote([], None, 1) for actor in bare])
        quickstart = measure(cluster, groups, bare, 512, 24, 1)
        by_batch = [measure(cluster, groups, bare, samples, tokens, PROCESSES) for samples, tokens in batches]
        by_workers = [measure(cluster, groups, bare, 512, 256, count) for count in workers]
    fit = summarize(by_batch, by_workers)
    console = Console(width=170)
    console.print(table_of("A step of the quickstart's size, one worker", [quickstart]))
    console.print(table_of(f"By batch, {PROCESSES} workers", by_batch))
    console.print(table_of("By workers", by_workers))
    console.print(
        f"fixed {fit['seconds_fixed'] * 1e3:.1f} ms, {fit['seconds_per_gb']:.2f} s per GB (exponent "
        f"{fit['exponent_of_bytes']:.2f}), {fit['seconds_per_worker'] * 1e3:.2f} ms per worker (exponent "
        f"{fit['exponent_of_workers']:.2f}); {PROCESSES} processes ready in {ready:.1f} s"
    )
    report = {
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "ray": ray.__version__,
                    "torch": str(torch.__version__)},
        "quickstart": asdict(quickstart),
        "by_batch": [asdict(row) for row in by_batch],
        "by_workers": [asdict(row) for row in by_workers],
        "fit": fit,
    }  # fmt: skip
    options.json.write_text(json.dumps(report, indent=2))
    console.print(f"wrote {options.json}")


if __name__ == "__main__":
    main()
