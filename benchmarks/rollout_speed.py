"""Tokens per second of rollout backends on one model of random weights: `python benchmarks/rollout_speed.py`.

Each backend runs in a process of its own for each number of threads: it starts, generates once to warm up, then takes
the best of several rounds. Prints a table and writes JSON (`--out`). CPU seconds tell more than seconds where a machine
has other work. Backends whose plugin is not installed are refused by name; run it in an environment that has them all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

SHAPES: dict[str, dict[str, Any]] = {
    "78M": {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 2},
    "153M": {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_key_value_heads": 4},
    "307M": {"hidden_size": 1152, "intermediate_size": 4608, "num_attention_heads": 18, "num_key_value_heads": 6},
}
"""By number of parameters; of Qwen2's kind."""
SHARED: dict[str, Any] = {"layers": 12, "head_dim": 64, "vocab_size": 32000, "max_position_embeddings": 1024}
WARM_TOKENS = 4
"""Of each response of the call that is not measured."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backends", default="transformers,vllm")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="of each response; none ends earlier")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--size", choices=SHAPES, default="78M", help="of the model")
    parser.add_argument("--out", type=Path, default=Path("rollout_speed.json"))
    parser.add_argument("--child", nargs=2, metavar=("BACKEND", "MODEL"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        backend, folder = args.child
        print(json.dumps(measure(backend, folder, args)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), args.size)
        for threads in args.threads.split(","):
            rows += [child(backend, folder, int(threads)) for backend in args.backends.split(",")]
    args.out.write_text(json.dumps({"settings": vars(args) | {"out": str(args.out)}, "rows": rows}, indent=1) + "\n")
    print_table(rows)


def write_model(folder: Path, size: str) -> None:
    from rlsdk.testing.process.models import write_tiny_model

    write_tiny_model(folder, **SHAPES[size], **SHARED)


def child(backend: str, folder: str, threads: int) -> dict[str, Any]:
    """One backend, in a fresh process with so many threads."""
    command = [sys.executable, __file__, *sys.argv[1:], "--child", backend, folder]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{backend}, {threads} threads: {row['tokens_per_s']:.0f} tokens/s", file=sys.stderr, flush=True)
    return row


def measure(backend: str, folder: str, args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from rlsdk.interfaces import BackendKind, ModelSpec, RankContext, RolloutSpec
    from rlsdk.registry import Registry

    threads = int(os.environ["OMP_NUM_THREADS"])
    torch.set_num_threads(threads)
    registry = Registry.discover()
    engine = registry.load_engine(registry.backend(BackendKind.ROLLOUT, backend))()
    start = time.perf_counter()
    engine.initialize(
        RankContext(role="rollout", num_threads=threads),
        RolloutSpec(
            model=ModelSpec(path=folder, dtype=args.dtype),
            max_model_tokens=args.prompt_tokens + args.tokens,
            max_running=args.prompts * args.samples,
        ),
    )
    started = time.perf_counter() - start
    generate(engine, args, -1, WARM_TOKENS)
    seconds, cpu_seconds = [], []
    for at in range(args.rounds):
        before, cpu_before = time.perf_counter(), cpu_time()
        tokens = generate(engine, args, at, args.tokens)
        seconds.append(time.perf_counter() - before)
        cpu_seconds.append(cpu_time() - cpu_before)
    engine.close()
    return {
        "backend": backend, "threads": threads, "start_s": started, "seconds": seconds, "tokens": tokens,
        "tokens_per_s": tokens / min(seconds), "cpu_seconds": cpu_seconds,
        "tokens_per_cpu_s": tokens / min(cpu_seconds),
    }  # fmt: skip


def cpu_time() -> float:
    """Of this process and of those that it started, which an engine may compute in."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    times = [process.cpu_times() for process in processes if process.is_running()]
    return sum(float(one.user + one.system) for one in times)


def generate(engine: Any, args: argparse.Namespace, seed: int, tokens: int) -> int:
    """One step's samples; returns how many tokens they have."""
    from rlsdk.interfaces import GenerationRequest, SamplingParams

    sampling = SamplingParams(max_tokens=tokens, seed=seed)
    prompts = [
        tuple((97 * p + 31 * i + seed) % 31000 + 3 for i in range(args.prompt_tokens)) for p in range(args.prompts)
    ]
    requests = [
        GenerationRequest(request_id=str(at), prompt_ids=ids, n=args.samples, sampling=sampling)
        for at, ids in enumerate(prompts)
    ]

    async def collect() -> int:
        return sum([len(output.token_ids) async for output in engine.generate(requests)])

    return asyncio.run(collect())


def print_table(rows: list[dict[str, Any]]) -> None:
    first = {row["threads"]: row for row in reversed(rows)}
    print("| backend | threads | start, s | tokens/s | over the first | tokens per CPU s | over the first |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        cells = [row["backend"], row["threads"], f"{row['start_s']:.1f}"]
        for key in ("tokens_per_s", "tokens_per_cpu_s"):
            cells += [f"{row[key]:.0f}", f"{row[key] / first[row['threads']][key]:.2f}"]
        print(f"| {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    main()
