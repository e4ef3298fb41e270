"""What moving the weights costs, beside copying the same bytes: `python -m benchmarks.reshard_move [--json PATH]`.

Two training processes hold the `Shard(0)` boxes of a Llama-like model in float32, as two FSDP ranks do (plain processes
with the same boxes and not FSDP itself: only the move is measured). One or two replicas of one or two tensor-parallel
processes take it, by each transport. Everything runs through the product's own planner, manager and both ends.

    python -m benchmarks.reshard_move                                   # 50 M and 500 M parameters, about 12 minutes
    python -m benchmarks.reshard_move --sizes 50m --transports ring --bucket-mb 8 64

    UCX_TLS=tcp,self python -m benchmarks.reshard_move --transports process_group nixl   # both over TCP

The yardstick is measured in the same run, in turns with the syncs: every rollout process copies, at the same time as
the others, as many bytes as it serves from a private buffer into the memory it serves from. Best of `--repeats` each.
`move`: weights only. `proven`: with fingerprints of all bytes on both sides and their comparison, as every sync of a
run does. `extra`: peak resident memory above that before the first sync, of the training and of the rollout process
that takes most; shared pages count in each process that maps them, but for the training side's own weights.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.move_processes import actors, here, processes
from rlsdk.interfaces import Box, TensorMeta, WeightLayout
from rlsdk.sharding import GenericShardingManager
from rlsdk.testing.sharding.tensor_engines import tensor_layout

SIZES: Mapping[str, tuple[int, int, int]] = {"50m": (512, 1408, 10), "500m": (1536, 4096, 16)}
"""Hidden size, inner size, layers."""
VOCABULARY = 32000
TRAIN_RANKS = 2
STREAMED = "ring, streamed"
"""That transport where the training side's weights are in private memory."""
TRANSPORTS = ("in_process", "ring", STREAMED, "process_group", "nixl", "object_store")
PLACES = {"in_process": here, "object_store": actors}
"""Where the two sides of a transport live; of the others each in a process of its own."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One row of the table. Milliseconds are the best of several."""

    parameters: int
    replicas: int
    tp: int
    transport: str
    bucket_mb: int
    num_bytes: int
    memcpy_ms: float
    move_ms: float
    proven_ms: float
    stages_ms: Mapping[str, float]
    train_extra_bytes: int
    rollout_extra_bytes: int


def shapes(size: str) -> dict[str, tuple[tuple[int, ...], int]]:
    """Shape and tensor-parallel dimension of every tensor."""
    hidden, inner, layers = SIZES[size]
    found: dict[str, tuple[tuple[int, ...], int]] = {"model.embed_tokens.weight": ((VOCABULARY, hidden), 0)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj"):
            found[f"{at}.self_attn.{name}.weight"] = ((hidden, hidden), 0)
        found[f"{at}.self_attn.o_proj.weight"] = ((hidden, hidden), 1)
        found[f"{at}.mlp.gate_proj.weight"] = ((inner, hidden), 0)
        found[f"{at}.mlp.up_proj.weight"] = ((inner, hidden), 0)
        found[f"{at}.mlp.down_proj.weight"] = ((hidden, inner), 1)
        found[f"{at}.input_layernorm.weight"] = ((hidden,), -1)
        found[f"{at}.post_attention_layernorm.weight"] = ((hidden,), -1)
    return found | {"model.norm.weight": ((hidden,), -1)}


def layouts(size: str, ranks: int, *, by_tp: bool) -> list[WeightLayout]:
    """Even parts along dimension 0 (as FSDP), or along each tensor's own dimension (tensor parallelism)."""
    tensors = shapes(size)
    metas = [TensorMeta(name=name, shape=shape, dtype="float32") for name, (shape, _) in tensors.items()]
    return [
        tensor_layout(
            metas, [(n, _part(s, d if by_tp else 0, rank, ranks)) for n, (s, d) in tensors.items()], rank=rank
        )
        for rank in range(ranks)
    ]


def _part(shape: tuple[int, ...], dim: int, rank: int, ranks: int) -> Box:
    if dim < 0:
        return Box.whole(shape)
    share = shape[dim] // ranks
    offset, extent = [0] * len(shape), list(shape)
    offset[dim], extent[dim] = rank * share, share
    return Box(tuple(offset), tuple(extent))


def measure(size: str, replicas: int, tp: int, args: argparse.Namespace) -> Iterator[Result]:
    """All transports, those between processes between the same ones."""
    wanted = layouts(size, tp, by_tp=True) * replicas
    held = layouts(size, TRAIN_RANKS, by_tp=False)
    for place in (here, processes, actors):
        chosen = [name for name in args.transports if PLACES.get(name, processes) is place]
        if not chosen:
            continue
        with tempfile.TemporaryDirectory() as folder, place(held, wanted, Path(folder), args.threads) as sides:
            for transport in chosen:
                for bucket_mb in args.bucket_mb:
                    names = [transport.partition(",")[0]]
                    manager = GenericShardingManager(*sides, bucket_bytes=bucket_mb << 20, transports=names)
                    manager.train.run("keep_weights_shared", transport == "ring")
                    yield _measure(manager, size, replicas, tp, transport, bucket_mb, args.repeats)


def _measure(
    manager: GenericShardingManager, size: str, replicas: int, tp: int, transport: str, bucket_mb: int, repeats: int
) -> Result:
    train, rollout = manager.train, manager.rollout
    plan = manager.plan(manager.ends().source, manager.ends().target)
    for group in (train, rollout):
        group.run("begin")
    memcpy, moves, proofs = [], [], []
    for turn in range(repeats + 1):
        memcpy.append(max(rollout.run("memcpy")))
        rollout.run("prove", False)
        start = time.perf_counter()
        manager.pull(plan, 2 * turn)
        moves.append(time.perf_counter() - start)
        if turn == 0:
            extra = [max(group.run("peak_extra_bytes")) for group in (train, rollout)]
        rollout.run("prove", True)
        train.run("optim_step")
        proofs.append(manager.sync_weights(plan, 2 * turn + 1))
    # The first turn takes pages and connects; it counts for memory only.
    best = min(proofs[1:], key=lambda report: report.seconds)
    hidden, inner, layers = SIZES[size]
    return Result(
        parameters=VOCABULARY * hidden + layers * (4 * hidden**2 + 3 * hidden * inner + 2 * hidden) + hidden,
        replicas=replicas,
        tp=tp,
        transport=transport,
        bucket_mb=bucket_mb,
        num_bytes=plan.num_bytes,
        memcpy_ms=min(memcpy[1:]) * 1e3,
        move_ms=min(moves[1:]) * 1e3,
        proven_ms=best.seconds * 1e3,
        stages_ms={stage: seconds * 1e3 for stage, seconds in best.stages_s.items()},
        train_extra_bytes=extra[0],
        rollout_extra_bytes=extra[1],
    )


def show(results: list[Result]) -> None:
    """Prints the table."""
    table = Table(title=f"2 training ranks to replicas, float32, {os.cpu_count()} CPUs")
    for heading in (
        "parameters",
        "replicas",
        "tp",
        "transport",
        "bucket MiB",
        "MB",
        "memcpy ms",
        "move ms",
        "/ memcpy",
        "GB/s",
        "proven ms",
        "/ memcpy",
        "extra MiB train",
        "rollout",
    ):
        table.add_column(heading, justify="right")
    for row in results:
        table.add_row(
            f"{row.parameters / 1e6:.0f} M",
            str(row.replicas),
            str(row.tp),
            row.transport,
            str(row.bucket_mb),
            f"{row.num_bytes / 1e6:.0f}",
            f"{row.memcpy_ms:.0f}",
            f"{row.move_ms:.0f}",
            f"{row.move_ms / row.memcpy_ms:.2f}",
            f"{row.num_bytes / row.move_ms / 1e6:.2f}",
            f"{row.proven_ms:.0f}",
            f"{row.proven_ms / row.memcpy_ms:.2f}",
            f"{row.train_extra_bytes / 2**20:.0f}",
            f"{row.rollout_extra_bytes / 2**20:.0f}",
        )
    Console(width=170).print(table)


def main() -> None:
    """Runs the cases asked for, prints the table, and writes JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=sorted(SIZES), default=list(SIZES))
    parser.add_argument("--replicas", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--tp", nargs="+", type=int, default=[1, 2])
    installed = [name for name in TRANSPORTS if name != "nixl" or find_spec("nixl")]
    parser.add_argument("--transports", nargs="+", default=installed)
    parser.add_argument("--bucket-mb", nargs="+", type=int, default=[64])
    parser.add_argument("--threads", type=int, default=1, help="of torch, in each process")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    machine = {"machine": platform.platform(), "cpus": os.cpu_count(), "torch": torch.__version__}
    results: list[Result] = []
    for case in product(args.sizes, args.replicas, args.tp):
        for row in measure(*case, args):
            results.append(row)
            if args.json:  # Row by row: the whole table takes minutes, and what was measured is not lost.
                args.json.write_text(json.dumps({**machine, "results": list(map(asdict, results))}, indent=2) + "\n")
    show(results)


if __name__ == "__main__":
    main()
