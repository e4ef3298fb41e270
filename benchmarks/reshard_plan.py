"""How long a reshard of a large model takes to plan, and how good the plan is: `python -m benchmarks.reshard_plan`.

Plans the weights of a 671B, a 1T and a 235B-parameter mixture of experts (public shapes of DeepSeek-V3, Kimi-K2 and
Qwen3-235B-A22B, see `moe_layouts`) from Megatron-like ranks (tensor x pipeline x expert x data parallel) to vLLM-like
replicas (tensor x expert parallel) on other nodes. No device, no network and no weight is needed: a plan is data.

    python -m benchmarks.reshard_plan                              # every case of CASES, a minute or two
    python -m benchmarks.reshard_plan --models 671b --cases 1024:256 --json plan.json
    python -m benchmarks.reshard_plan --inter-node-gb-s 25         # 200 Gbit/s a rank

Columns: seconds to plan from layouts as they arrive, rank by rank, from other processes (nothing shared between them);
transfers in the plan; bytes that move, and over the lower bound, which is counted from the layouts by another way;
bytes over those of gathering every tensor whole and broadcasting it to every rollout rank; the most that any rank's
network link carries in or out; the busiest source over the mean of all sources, and over the mean of its pipeline
stage (other stages hold other layers, so no plan can even those out); seconds of that busiest link at the bandwidths
given: the time of a transport that keeps it full, with no allowance for latency or contention in the switches; calls
that one rollout rank makes in a sync (one to each source that it takes from, by NCCL), and buckets that they bring:
it was one call a bucket; and whether the plugins of this repository start both ends in just this layout.
"""

from __future__ import annotations

import argparse
import json
import pickle
import platform
import resource
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.moe_layouts import GPUS_PER_NODE, MODELS, MoeShape, megatron_like, num_parameters, vllm_like
from rlsdk.interfaces import DTYPE_BYTES, ReshardPlan, WeightLayout
from rlsdk.sharding import TRANSPORTS, plan_reshard
from rlsdk.sharding.plan.packed_plan import PackedParts, sources_of

MEGATRON_TAKES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Architectures of the plugin `megatron` (`plugins/megatron/src/rlsdk_megatron/plugin.py`)."""
SPLITS = {
    "671b": {"tp": 8, "pp": 16, "ep": 64, "rollout_tp": 8, "rollout_ep": 32},
    "1t": {"tp": 8, "pp": 16, "ep": 64, "rollout_tp": 8, "rollout_ep": 32},
    "235b": {"tp": 4, "pp": 8, "ep": 32, "rollout_tp": 8, "rollout_ep": 8},
}
"""By model, where nothing else is asked for."""
CASES = ("1024:256", "1024:512", "1024:1024", "4096:256", "4096:1024")
"""Training ranks : rollout ranks."""
BUCKET_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class Result:
    """One row of the table."""

    model: str
    parameters: int
    source_ranks: int
    source_parallel: str
    target_ranks: int
    target_parallel: str
    boxes: int
    plan_s: float
    transfers: int
    moved_bytes: int
    lower_bound_bytes: int
    broadcast_bytes: int
    busiest_link_bytes: int
    load_over_mean: float
    load_over_stage_mean: float
    predicted_s: float
    broadcast_predicted_s: float
    calls_of_a_target: int
    buckets_of_a_target: int
    starts: str
    peak_rss_bytes: int


def received(layouts: list[WeightLayout]) -> list[WeightLayout]:
    """As they come from other processes: no object of one is part of another."""
    return [pickle.loads(pickle.dumps(layout)) for layout in layouts]


def links(plan: ReshardPlan, source: list[WeightLayout], target: list[WeightLayout]) -> tuple[dict[str, float], int]:
    """Bytes of the busiest rank, in or out, within nodes and between them; and the number of transfers."""
    parts = plan.parts
    if not isinstance(parts, PackedParts):
        raise TypeError(f"the planner gave {type(parts).__name__}: expected columns")
    routes = parts.routes
    numbers: dict[str, int] = {}
    nodes = [np.array([numbers.setdefault(layout.node, len(numbers)) for layout in side]) for side in (source, target)]
    inside = nodes[0][routes.source] == nodes[1][routes.target]
    busiest = {
        kind: max(
            float(np.bincount(ranks[rows], routes.num_bytes[rows]).max(initial=0))
            for ranks in (routes.source, routes.target)
        )
        for kind, rows in (("intra", inside), ("inter", ~inside))
    }
    return busiest, sum(len(parts[at].columns.source) for at in range(len(parts)))


def starts(shape: MoeShape, rollout_tp: int, rollout_ep: int) -> str:
    """Whether the plugins `megatron` and `vllm` start these layouts: `yes`, or what they do not take."""
    missing = []
    if shape.architecture not in MEGATRON_TAKES:
        missing.append(f"megatron takes no {shape.architecture}")
    if rollout_tp > GPUS_PER_NODE and rollout_tp != rollout_ep:
        missing.append("vllm has each copy of attention (rollout.dp_size) on one node")
    return "; ".join(missing) or "yes"


def measure(model: str, source_ranks: int, target_ranks: int, given: argparse.Namespace) -> Result:
    """Plans one case."""
    shape = MODELS[model]
    args = argparse.Namespace(**vars(given))
    for name, size in SPLITS[model].items():
        if getattr(args, name) is None:
            setattr(args, name, size)
    source = received(megatron_like(shape, tp=args.tp, pp=args.pp, ep=args.ep, ranks=source_ranks))
    target = received(vllm_like(shape, tp=args.rollout_tp, ep=args.rollout_ep, ranks=target_ranks))
    seconds = []
    for _ in range(args.repeats):
        start = time.perf_counter()
        plan = plan_reshard(source, target, bucket_bytes=BUCKET_BYTES, transports=TRANSPORTS)
        seconds.append(time.perf_counter() - start)
    busiest, transfers = links(plan, source, target)
    load = np.array(list(plan.source_load.values()), float)
    stages = load.reshape(args.pp, -1)
    model_bytes = sum(int(np.prod(meta.shape)) * DTYPE_BYTES[meta.dtype] for meta in plan.tensors.values())
    return Result(
        model=shape.name,
        parameters=num_parameters(shape),
        source_ranks=source_ranks,
        source_parallel=f"tp{args.tp} pp{args.pp} ep{args.ep} dp{source_ranks // args.pp // args.tp}",
        target_ranks=target_ranks,
        target_parallel=f"tp{args.rollout_tp} ep{args.rollout_ep} x{target_ranks // args.rollout_ep}",
        boxes=sum(len(layout.boxes) for layout in (*source, *target)),
        plan_s=min(seconds),
        transfers=transfers,
        moved_bytes=plan.moved_bytes,
        lower_bound_bytes=plan.lower_bound_bytes,
        broadcast_bytes=model_bytes * target_ranks,
        busiest_link_bytes=int(max(busiest.values())),
        load_over_mean=float(load.max() / load.mean()),
        load_over_stage_mean=float((stages.max(axis=1) / stages.mean(axis=1)).max()),
        predicted_s=max(busiest["inter"] / args.inter_node_gb_s, busiest["intra"] / args.intra_node_gb_s) / 1e9,
        broadcast_predicted_s=model_bytes / args.inter_node_gb_s / 1e9,
        calls_of_a_target=len(sources_of(plan.parts[0])),
        buckets_of_a_target=len(plan.parts[0]),
        starts=starts(shape, args.rollout_tp, args.rollout_ep),
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def show(results: list[Result], args: argparse.Namespace) -> None:
    """Prints the table."""
    table = Table(
        title=f"Reshard plans, {args.intra_node_gb_s:g} GB/s within a node, {args.inter_node_gb_s:g} GB/s between nodes"
    )
    for heading in (
        "model",
        "train ranks",
        "rollout ranks",
        "plan s",
        "transfers",
        "us each",
        "moved TB",
        "/ bound",
        "/ broadcast",
        "busiest link GB",
        "load max/mean",
        "in a stage",
        "predicted s",
        "broadcast s",
        "calls",
        "buckets",
    ):
        table.add_column(heading, justify="right")
    for row in results:
        table.add_row(
            f"{row.model} {row.parameters / 1e9:.0f}B",
            f"{row.source_ranks} {row.source_parallel}",
            f"{row.target_ranks} {row.target_parallel}",
            f"{row.plan_s:.2f}",
            f"{row.transfers:,}",
            f"{row.plan_s / row.transfers * 1e6:.2f}",
            f"{row.moved_bytes / 1e12:.2f}",
            f"{row.moved_bytes / row.lower_bound_bytes:.6f}",
            f"{row.moved_bytes / row.broadcast_bytes:.4f}",
            f"{row.busiest_link_bytes / 1e9:.1f}",
            f"{row.load_over_mean:.3f}",
            f"{row.load_over_stage_mean:.4f}",
            f"{row.predicted_s:.2f}",
            f"{row.broadcast_predicted_s:.1f}",
            str(row.calls_of_a_target),
            str(row.buckets_of_a_target),
        )
    console = Console(width=220)
    console.print(table)
    for model in dict.fromkeys(row.model for row in results):
        ways = dict.fromkeys(row.starts for row in results if row.model == model)
        console.print(f"{model}: the plugins megatron and vllm start these layouts: {', '.join(ways)}")


def main() -> None:
    """Runs the cases asked for, prints the table, and writes JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=sorted(MODELS, reverse=True))
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="TRAIN:ROLLOUT")
    for name in ("--tp", "--pp", "--ep", "--rollout-tp"):
        parser.add_argument(name, type=int, help="of each model's own (SPLITS) where not given")
    parser.add_argument("--rollout-ep", type=int, help="ranks of a replica")
    parser.add_argument("--intra-node-gb-s", type=float, default=400.0, help="one way, per rank")
    parser.add_argument("--inter-node-gb-s", type=float, default=50.0, help="one way, per rank")
    parser.add_argument("--repeats", type=int, default=1, help="plans of each case; the fastest counts")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = []
    for model in args.models:
        for case in args.cases:
            train, _, rollout = case.partition(":")
            results.append(measure(model, int(train), int(rollout), args))
    show(results, args)
    if args.json:
        machine = {"machine": platform.platform(), "python": platform.python_version(), "numpy": np.__version__}
        args.json.write_text(json.dumps({**machine, "results": [asdict(row) for row in results]}, indent=2) + "\n")


if __name__ == "__main__":
    main()
