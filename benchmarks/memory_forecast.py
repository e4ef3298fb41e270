"""Memory that engines take, phase by phase, against what `rlsdk plan` counts for them: one process for each rank.

`python -m benchmarks.memory_forecast [--hidden 512 --layers 6 --row-tokens 256 --json FILE]`. Main memory on a CPU: the
high-water mark of each phase, less what the process had before the engine was made.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import platform
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MIB = 1 << 20
SETTINGS = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Memory that is freed goes back at once, so that high-water marks are those of what lives."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One engine."""

    backend: str
    world: int
    dtype: str = "float32"
    checkpointing: bool = False
    options: tuple[tuple[str, int], ...] = ()
    """Of the backend."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of the model and of what goes through it."""

    hidden: int
    layers: int
    vocabulary: int
    row_tokens: int
    micro_batch_rows: int
    micro_batches: int


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One phase of one engine, on one rank."""

    case: Case
    phase: str
    forecast_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        return self.forecast_bytes / self.measured_bytes - 1


CASES = (
    Case(backend="torch", world=1),
    Case(backend="torch", world=1, checkpointing=True),
    Case(backend="torch", world=1, dtype="bfloat16"),
    Case(backend="fsdp", world=2),
    Case(backend="fsdp", world=2, checkpointing=True),
    Case(backend="fsdp", world=2, dtype="bfloat16"),
    Case(backend="transformers", world=1),
    Case(backend="megatron", world=1),
    Case(backend="megatron", world=2, options=(("tensor_parallel", 2),)),
    Case(backend="megatron", world=2, options=(("pipeline_parallel", 2),)),
    Case(backend="megatron", world=2, dtype="bfloat16", options=(("tensor_parallel", 2),)),
    Case(backend="megatron", world=2, checkpointing=True, options=(("tensor_parallel", 2),)),
)


def make_model(folder: Path, size: Size) -> Path:
    """Writes a random Llama and a tokenizer."""
    from rlsdk.testing.process.models import write_tiny_model

    heads = size.hidden // 64
    return write_tiny_model(
        folder, architecture="llama", layers=size.layers, hidden_size=size.hidden, intermediate_size=3 * size.hidden,
        vocab_size=size.vocabulary, num_attention_heads=heads, num_key_value_heads=max(heads // 4, 1), head_dim=64,
    )  # fmt: skip


def measure(case: Case, size: Size, model: str, shown: int = 0) -> list[Measured]:
    """Runs one engine in processes of its own; figures are those of rank `shown`."""
    before = {name: os.environ.get(name) for name in SETTINGS}
    os.environ.update(SETTINGS)
    spawn = multiprocessing.get_context("spawn")
    answers: Any = spawn.Queue()
    ports: Any = spawn.Queue()
    work = rollout_rank if case.backend == "transformers" else train_rank
    ranks = [
        spawn.Process(target=work, args=(case, size, model, at, shown, ports, answers)) for at in range(case.world)
    ]
    try:
        for rank in ranks:
            rank.start()
        found: Mapping[str, tuple[int, int]] = answers.get(timeout=240)
        for rank in ranks:
            rank.join(60)
    finally:
        for rank in ranks:
            rank.kill()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return [
        Measured(case=case, phase=phase, forecast_bytes=counted, measured_bytes=taken)
        for phase, (counted, taken) in found.items()
    ]


def train_rank(case: Case, size: Size, model: str, rank: int, shown: int, ports: Any, answers: Any) -> None:
    """One rank of a train engine."""
    import torch

    from rlsdk.algorithms import PolicyObjective
    from rlsdk.interfaces import BackendKind, Batch, ModelSpec, OptimSpec, RankContext, TrainSpec, Workload
    from rlsdk.kit.ranks.rendezvous import hold_port
    from rlsdk.registry import Registry

    torch.set_num_threads(1)
    registry = Registry.discover()
    backend = registry.backend(BackendKind.TRAIN, case.backend)
    forecast, engine_class = registry.load_forecast(backend), registry.load_engine(backend)
    assert forecast is not None
    options = (registry.load_options(backend) or dict)(**dict(case.options)) if case.options else None
    dp_size = case.world // math.prod(value for _, value in case.options)
    port = 0
    if case.world > 1:
        port = hold_port("127.0.0.1") if rank == 0 else ports.get(timeout=120)
        for _ in range(case.world - 1 if rank == 0 else 0):
            ports.put(port)
    contexts = [
        RankContext(role="actor", rank=at, world_size=case.world, local_rank=at, master_port=port, timeout_s=200.0)
        for at in range(case.world)
    ]
    spec = TrainSpec(
        model=ModelSpec(path=model, dtype=case.dtype),
        optim=OptimSpec(lr=1e-5),
        micro_batch_rows=size.micro_batch_rows,
        activation_checkpointing=case.checkpointing,
        options=options,
    )
    num_rows = size.micro_batch_rows * size.micro_batches
    counted = forecast(
        contexts, spec, Workload(row_tokens=size.row_tokens, update_rows=num_rows * dp_size, running_rows=1)
    ).memory[rank]
    rows = torch.randint(2, size.vocabulary, (num_rows, size.row_tokens))
    batch = Batch.from_rows(rows.tolist())
    mask = batch.position_ids > 0
    noise = torch.randn(batch.num_tokens) * mask
    batch = batch.with_tokens(
        response_mask=mask,
        advantages=noise,
        old_log_probs=noise,
        rollout_log_probs=noise,
        loss_weight=mask / mask.sum(),
    )
    base = resident()
    engine = engine_class()
    engine.initialize(contexts[rank], spec)
    seen = {"weights": resident() - base}
    clear_mark()
    engine.forward(batch, ("log_probs",))
    seen["log_probs"] = high_water() - base
    for _ in range(2):  # the optimizer's memory is taken by the first step
        clear_mark()
        engine.forward_backward(batch, PolicyObjective())
        engine.optim_step()
        seen["update"] = high_water() - base
    engine.close()
    weights = counted.weights_bytes or 0
    kept = (counted.gradients_bytes or 0) if counted.gradients_stay else 0
    update = (counted.optimizer_bytes, counted.gradients_bytes, counted.backward_bytes)
    expected = {
        "weights": weights + kept,
        "log_probs": weights + kept + (counted.forward_bytes or 0),
        "update": weights + sum(part or 0 for part in update),
    }
    if rank == min(shown, case.world - 1):
        answers.put({phase: (expected[phase], seen[phase]) for phase in seen})


def rollout_rank(case: Case, size: Size, model: str, rank: int, shown: int, ports: Any, answers: Any) -> None:
    """One rollout engine, all of its samples at full length."""
    import torch

    from rlsdk.interfaces import (
        BackendKind,
        GenerationRequest,
        ModelSpec,
        RankContext,
        RolloutSpec,
        SamplingParams,
        Workload,
    )
    from rlsdk.registry import Registry

    torch.set_num_threads(1)
    registry = Registry.discover()
    backend = registry.backend(BackendKind.ROLLOUT, case.backend)
    forecast, engine_class = registry.load_forecast(backend), registry.load_engine(backend)
    assert forecast is not None
    running, ctx = 32, RankContext(role="rollout")
    spec = RolloutSpec(
        model=ModelSpec(path=model, dtype=case.dtype), max_model_tokens=size.row_tokens, max_running=running
    )
    counted = forecast([ctx], spec, Workload(row_tokens=size.row_tokens, update_rows=1, running_rows=running)).memory[0]
    base = resident()
    engine = engine_class()
    engine.initialize(ctx, spec)
    seen = {"weights": resident() - base}
    clear_mark()

    async def generate() -> None:
        sampling = SamplingParams(max_tokens=size.row_tokens - 8, seed=1)
        request = GenerationRequest(request_id="a", prompt_ids=(2,) * 8, sampling=sampling, n=running)
        async for _ in engine.generate([request]):
            pass

    asyncio.run(generate())
    seen["rollout"] = high_water() - base
    engine.close()
    weights = counted.weights_bytes or 0
    expected = {"weights": weights, "rollout": weights + (counted.cache_bytes or 0) + (counted.forward_bytes or 0)}
    answers.put({phase: (expected[phase], seen[phase]) for phase in seen})


def resident() -> int:
    """Bytes of main memory that this process has now."""
    return _status("VmRSS")


def high_water() -> int:
    """The most that it had since `clear_mark`."""
    return _status("VmHWM")


def clear_mark() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) << 10


def show(results: list[Measured]) -> None:
    """Prints the table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Memory of one rank besides the process itself, MiB")
    for heading in ("engine", "ranks", "dtype", "phase", "forecast", "measured", "error"):
        table.add_column(heading, justify="right")
    for row in results:
        split = "".join(f", {name} {value}" for name, value in row.case.options)
        name = row.case.backend + split + (", recomputing" if row.case.checkpointing else "")
        figures = (f"{size / MIB:.0f}" for size in (row.forecast_bytes, row.measured_bytes))
        table.add_row(name, f"{row.case.world}", row.case.dtype, row.phase, *figures, f"{row.error:+.1%}")
    Console(width=120).print(table)


def main() -> None:
    """Runs all cases, prints the table, and writes JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--row-tokens", type=int, default=256)
    parser.add_argument("--micro-batch-rows", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--engines", nargs="+", default=sorted({case.backend for case in CASES}))
    parser.add_argument("--dtypes", nargs="+", default=sorted({case.dtype for case in CASES}))
    parser.add_argument("--rank", type=int, default=0, help="of which figures are shown, where there are several")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    size = Size(
        hidden=args.hidden,
        layers=args.layers,
        vocabulary=args.vocabulary,
        row_tokens=args.row_tokens,
        micro_batch_rows=args.micro_batch_rows,
        micro_batches=args.micro_batches,
    )
    results: list[Measured] = []
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model", size)
        for case in (c for c in CASES if c.backend in args.engines and c.dtype in args.dtypes):
            results += measure(case, size, str(model), args.rank)
            last = results[-1]
            print(f"{last.case}: {last.phase} {last.error:+.1%}", flush=True)
    show(results)
    if args.json:
        machine = {"machine": platform.platform(), "python": platform.python_version()}
        rows = [{**asdict(row), "error": row.error} for row in results]
        args.json.write_text(json.dumps({**machine, "size": asdict(size), "results": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
