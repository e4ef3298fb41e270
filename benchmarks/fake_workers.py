"""What a step costs the controller with 64 to 1,024 workers: `python -m benchmarks.fake_workers [--json PATH]`.

Makes the calls of one step (two forwards over the same tokens, a reference's among them, then optimizer steps on
mini-batches) on hosts that compute nothing. Everything that the controller does is real: it cuts and balances rows,
stores them, sends each worker its call over Ray, waits, and joins the rows of all answers.

What is not real: several workers share a process (64 by default), so the machine need not hold a thousand; the
controller sends each of them a call of its own all the same. All processes are on one machine. `--workers-per-node`
tells the controller that so many of them make a node, so it stores for each node the slices of its own ranks. What is
not seen here is what a thousand processes cost Ray itself: connections, heartbeats, transfers between machines.

Measured: CPU time of the controller's process, all its threads and Ray's among them, per worker and step; of that the
share that Ray takes for as many calls with bare references; and the bytes that go to each node.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import ray
import torch
from rich.console import Console
from rich.table import Table

from rlsdk.algorithms import PolicyObjective
from rlsdk.cluster import Cluster, Join, PlacementSpec, PoolSpec, Split, WorkerGroup, dispatch
from rlsdk.cluster.calls.handle import WorkerHandle
from rlsdk.cluster.devices.worker_info import WorkerInfo
from rlsdk.cluster.group import Member
from rlsdk.interfaces import Batch, Objective, Parallel, RankContext

HOST = "benchmarks.fake_workers:FakeHost"
UPDATE_FIELDS = ("response_mask", "old_log_probs", "ref_log_probs", "advantages", "loss_weight")
WORKERS = (64, 128, 256, 512, 1024)
REPEATS = 5


class FakeHost:
    """Answers at once, with results of the right shape; counts its calls and the bytes that it read."""

    def __init__(self, ctx: RankContext) -> None:
        self.calls = 0
        self.bytes = 0

    @dispatch(split=Split.DATA, join=Join.ROWS)
    def forward(self, batch: Batch, outputs: dict[str, str]) -> Batch:
        self._count(batch)
        (field,) = outputs.values()
        return batch.keep(()).with_tokens(**{field: torch.zeros(batch.num_tokens)})

    @dispatch(split=Split.DATA, join=Join.FIRST)
    def update(self, batch: Batch, objective: Objective) -> float:
        self._count(batch)
        return 0.0

    def counted(self) -> tuple[int, int]:
        """Calls and bytes since the last time."""
        found = self.calls, self.bytes
        self.calls = self.bytes = 0
        return found

    def _count(self, batch: Batch) -> None:
        self.calls += 1
        self.bytes += batch.num_bytes


class Placed:
    """A worker that the controller believes to be on a node of another number."""

    def __init__(self, worker: WorkerHandle, node: str) -> None:
        self._worker = worker
        self._info = replace(worker.known(), node_id=node)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def known(self) -> WorkerInfo:
        return self._info


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured setting."""

    workers: int
    nodes: int
    rows: int
    batch_mb: float
    """Of all fields that are sent in a step, once."""
    seconds: float
    """Of a step, wall clock, with every process on this machine."""
    controller_cpu_ms: float
    """Per worker and step, median of the repetitions."""
    ray_cpu_ms: float
    """Of that, what as many calls on the same actors cost with nothing but a reference in them."""
    calls: float
    """Per worker and step."""
    stored_mb: float
    """Written to the object store in a step, all objects together."""
    sent_to_node_mb: float
    """Of a step, mean over nodes."""


def make_batch(rows: int, tokens: int) -> Batch:
    """Random lengths that average three quarters of `tokens`."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(tokens // 2, tokens + 1, (rows,), generator=generator)
    total = int(lengths.sum())
    return Batch(
        lengths=lengths,
        tokens={"input_ids": torch.zeros(total, dtype=torch.int64), "response_mask": torch.ones(total).bool()},
        rows={"row_id": torch.arange(rows)},
    )


class CountedStore:
    """Counts what is written to the object store."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.bytes = 0
        self._put = cluster._fields._put
        cluster._fields._put = self.put

    def put(self, batch: Batch) -> Any:
        self.bytes += batch.num_bytes
        return self._put(batch)


def run_step(cluster: Cluster, group: WorkerGroup, batch: Batch, updates: int) -> None:
    """As the learner does it."""
    for name in ("old_log_probs", "ref_log_probs"):
        needed = cluster.put(batch.keep(("input_ids", "response_mask")))
        answer = group.run("forward", needed, {"log_probs": name})
        batch = batch.with_tokens(**{name: answer[name]})
    zeros = torch.zeros(batch.num_tokens)
    batch = batch.with_tokens(advantages=zeros, loss_weight=zeros.clone())
    stored = cluster.put(batch.keep(("input_ids", *UPDATE_FIELDS)))
    objective = PolicyObjective(loss_options={"clip_low": 0.2}, kl_coef=0.001)
    waiting = [
        group.submit("update", stored.select(torch.arange(at, batch.num_rows, updates)), objective)
        for at in range(updates)
    ]
    for pending in waiting:
        pending.result()


def fake_group(cluster: Cluster, groups: Sequence[WorkerGroup], workers: int, per_node: int) -> WorkerGroup:
    """The first ranks of many groups as one data-parallel group; neighbours share a node."""
    members = [member for group in groups for member in group.members][:workers]
    ranks = [
        Member(
            worker=Placed(member.worker, f"node-{rank // per_node}"),  # type: ignore[arg-type]
            ctx=replace(member.ctx, rank=rank, world_size=workers),
            parallel=Parallel(dp_rank=rank, dp_size=workers),
        )
        for rank, member in enumerate(members)
    ]
    fake = WorkerGroup("fake", ranks, groups[0].methods, put=cluster.put, timeout_s=300)
    return fake


@ray.remote(num_cpus=0, max_concurrency=1)
class BareActor:
    """What is left of a worker without rlsdk."""

    def call(self, refs: Sequence[Any], answer_floats: int) -> Any:
        for ref in refs:
            ray.get(ref)
        return torch.zeros(answer_floats).numpy()


def bare_step(actors: Sequence[Any], workers: int, calls: int, floats: int) -> None:
    """As many calls, each with one reference, and answers of the same size where rows come back."""
    for at in range(calls):
        ref = ray.put(b"0" * 1000)
        size = floats if at < 2 else 1
        ray.get([actors[worker % len(actors)].call.remote([ref], size) for worker in range(workers)])


def measure(
    cluster: Cluster, groups: Sequence[WorkerGroup], bare: Sequence[Any], workers: int, options: argparse.Namespace
) -> Row:
    per_node = options.workers_per_node or workers
    group = fake_group(cluster, groups, workers, per_node)
    rows = workers * options.rows_per_worker
    run_step(cluster, group, make_batch(rows, options.tokens), options.updates)
    group.run("counted")
    store, cpus, walls = CountedStore(cluster), [], []
    profile = cProfile.Profile()
    for _ in range(REPEATS):
        batch = make_batch(rows, options.tokens)  # a new step's tensors
        start, cpu = time.perf_counter(), time.process_time()
        if options.profile and workers == max(options.workers):
            profile.runcall(run_step, cluster, group, batch, options.updates)
        else:
            run_step(cluster, group, batch, options.updates)
        walls.append(time.perf_counter() - start)
        cpus.append(time.process_time() - cpu)
    if options.profile and workers == max(options.workers):
        profile.dump_stats(options.profile)
    counted = group.run("counted")
    cluster._fields._put = store._put
    calls = sum(calls for calls, _ in counted) / workers / REPEATS
    floats = make_batch(options.rows_per_worker, options.tokens).num_tokens
    ray_cpus = []
    for _ in range(3):
        cpu = time.process_time()
        bare_step(bare, workers, round(calls), floats)
        ray_cpus.append(time.process_time() - cpu)
    nodes = math.ceil(workers / per_node)
    return Row(
        workers=workers,
        nodes=nodes,
        rows=rows,
        batch_mb=batch.num_tokens * (8 + 1 + 4 * 4) / 1e6,
        seconds=statistics.median(walls),
        controller_cpu_ms=statistics.median(cpus) / workers * 1e3,
        ray_cpu_ms=statistics.median(ray_cpus) / workers * 1e3,
        calls=calls,
        stored_mb=store.bytes / REPEATS / 1e6,
        sent_to_node_mb=(store.bytes / REPEATS / 1e6) / nodes,
    )


def exponent(rows: Sequence[Row]) -> float:
    """Slope of log CPU time per step over log workers: 1 is linear, as flat per worker."""
    x = [math.log(row.workers) for row in rows]
    y = [math.log(row.controller_cpu_ms * row.workers) for row in rows]
    slope, _ = statistics.linear_regression(x, y)
    return slope


def table_of(rows: Sequence[Row]) -> Table:
    table = Table(title="Controller's CPU per worker and step", title_justify="left")
    for name in ("workers", "nodes", "rows", "batch MB", "s/step here", "CPU ms/worker-step", "of bare Ray calls",
                 "calls/worker-step", "stored MB", "MB to a node"):  # fmt: skip
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row.workers), str(row.nodes), str(row.rows), f"{row.batch_mb:.1f}", f"{row.seconds:.2f}",
            f"{row.controller_cpu_ms:.2f}", f"{row.ray_cpu_ms:.2f}", f"{row.calls:.0f}", f"{row.stored_mb:.1f}",
            f"{row.sent_to_node_mb:.2f}",
        )  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS, help="sizes to measure")
    parser.add_argument("--processes", type=int, default=8, help="real processes that share the workers")
    parser.add_argument("--workers-per-node", type=int, default=8, help="0: all on one node")
    parser.add_argument("--rows-per-worker", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="of the longest row")
    parser.add_argument("--updates", type=int, default=1, help="optimizer steps in a step (trainer.updates_per_step)")
    parser.add_argument("--profile", type=Path, default=None, help="write a cProfile of the largest size here")
    parser.add_argument("--json", type=Path, default=None, help="write the rows here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    each = math.ceil(max(options.workers) / options.processes)
    roles = [f"fake{number}" for number in range(each)]
    pool = PoolSpec(name="fake", devices_per_node=(options.processes,))
    placement = PlacementSpec(pools=(pool,), roles=dict.fromkeys(roles, "fake"))
    with Cluster.start(placement, timeout_s=300, preload=["torch"]) as cluster:
        groups = [cluster.create_group(role, HOST) for role in roles]
        actor_class: Any = BareActor
        bare = [actor_class.remote() for _ in range(options.processes)]
        ray.get([actor.call.remote([], 1) for actor in bare])
        rows = [measure(cluster, groups, bare, workers, options) for workers in options.workers]
    console = Console(width=150)
    console.print(table_of(rows))
    if len(rows) > 1:
        console.print(
            f"CPU of a step grows as workers to the power {exponent(rows):.2f}; {options.processes} processes"
        )
    if options.json is not None:
        machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "ray": ray.__version__}
        report = {"machine": machine, "processes": options.processes, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
