"""Memory and gradients of one long row whose tokens two ranks of the backend `fsdp` split, beside one process.

`python -m benchmarks.long_rows [--tokens 65536 --context-parallel 2 --json FILE]`. A tiny random model on a CPU, one
thread a process; `growth` is the high-water mark of a forward and backward pass, less what the process has after a
short first pass.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.memory_forecast import MIB, SETTINGS, clear_mark, high_water, resident
from rlsdk.algorithms import PolicyObjective
from rlsdk.interfaces import Batch, ModelSpec, OptimSpec, RankContext, TrainSpec
from rlsdk.kit.ranks.rendezvous import hold_port
from rlsdk.testing.process.models import write_tiny_model

WARM_TOKENS = 64
TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Measured:
    """One pass over the row."""

    growth_bytes: int
    """Of the rank that grows most."""
    seconds: float
    gradients: dict[str, Tensor]
    """Put together from all ranks."""


def measure(model: str, tokens: int, context_parallel: int) -> Measured:
    """Runs a row of random tokens in new processes, one for each rank that splits it."""
    before = {name: os.environ.get(name) for name in SETTINGS}
    os.environ.update(SETTINGS)
    spawn = multiprocessing.get_context("spawn")
    ports, answers = spawn.Queue(), spawn.Queue()
    world = range(context_parallel)
    ranks = [spawn.Process(target=run_rank, args=(at, len(world), model, tokens, ports, answers)) for at in world]
    try:
        for process in ranks:
            process.start()
        found = [answers.get(timeout=TIMEOUT_S) for _ in ranks]
        for process in ranks:
            process.join(60)
    finally:
        for process in ranks:
            process.kill()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    parts: dict[str, dict[int, Tensor]] = {}
    for _, _, gradients in found:
        for name, first, values in gradients:
            parts.setdefault(name, {})[first] = torch.from_numpy(values)
    whole = {name: torch.cat([rows[first] for first in sorted(rows)]) for name, rows in parts.items()}
    return Measured(max(growth for growth, _, _ in found), max(seconds for _, seconds, _ in found), whole)


def run_rank(rank: int, world: int, model: str, tokens: int, ports: Any, answers: Any) -> None:
    """One process: answers with growth in bytes, seconds, and its rows of each gradient."""
    from rlsdk_fsdp.config import FsdpOptions
    from rlsdk_fsdp.engine import FsdpTrainEngine

    torch.set_num_threads(1)
    port = hold_port("127.0.0.1") if rank == 0 else ports.get(timeout=120)
    for _ in range(world - 1 if rank == 0 else 0):
        ports.put(port)
    engine = FsdpTrainEngine()
    engine.initialize(
        RankContext(
            role="actor", rank=rank, world_size=world, local_rank=rank, master_port=port, timeout_s=TIMEOUT_S / 2
        ),
        TrainSpec(
            model=ModelSpec(path=model),
            optim=OptimSpec(lr=1e-4),
            micro_batch_rows=1,
            options=FsdpOptions(context_parallel=world),
        ),
    )
    # Allocators, kernels and the group's connections are set up by a pass and a step that do not count.
    engine.forward_backward(row_of(WARM_TOKENS), PolicyObjective())
    engine._drop_gradients()
    batch = row_of(tokens)
    start, began = resident(), time.perf_counter()
    clear_mark()
    engine.forward_backward(batch, PolicyObjective())
    growth, seconds = high_water() - start, time.perf_counter() - began
    gradients = []
    for piece in engine.pieces:
        piece.take_gradient()
        if piece.box.numel and piece.held.grad is not None:
            gradients.append((piece.name, piece.box.offset[0], piece.held.grad.numpy()))
    answers.put((growth, seconds, gradients))
    engine.close()


def row_of(tokens: int) -> Batch:
    """One row with everything that a policy's update reads; its second half is the response."""
    generator = torch.Generator().manual_seed(tokens)
    batch = Batch.from_rows([torch.randint(3, 128, (tokens,), generator=generator).tolist()])
    mask = batch.position_ids >= tokens // 2
    noise = torch.randn(tokens, generator=generator) * mask
    return batch.with_tokens(
        response_mask=mask,
        advantages=noise,
        old_log_probs=-4.8 * mask,
        rollout_log_probs=-4.8 * mask,
        loss_weight=mask / mask.sum(),
    )


def difference(found: Measured, expected: Measured) -> float:
    """Largest difference of a gradient, relative to the largest gradient of its parameter."""
    assert found.gradients.keys() == expected.gradients.keys()
    return max(
        float((found.gradients[name] - gradient).abs().max()) / max(float(gradient.abs().max()), 1e-12)
        for name, gradient in expected.gradients.items()
    )


def write_model(folder: Path) -> str:
    return str(write_tiny_model(folder, hidden_size=64, intermediate_size=128, head_dim=16))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--context-parallel", type=int, default=2)
    parser.add_argument("--json", type=Path, help="where figures are written")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model")
        one, split = (measure(model, args.tokens, size) for size in (1, args.context_parallel))
    figures = {
        "tokens": args.tokens,
        "context_parallel": args.context_parallel,
        "growth_bytes_of_one_process": one.growth_bytes,
        "growth_bytes_of_largest_rank": split.growth_bytes,
        "growth": split.growth_bytes / one.growth_bytes,
        "seconds_of_one_process": one.seconds,
        "seconds_of_ranks": split.seconds,
        "gradient_difference": difference(split, one),
    }
    print(
        f"{args.tokens:,} tokens: one process grows by {one.growth_bytes / MIB:.0f} MiB in {one.seconds:.0f} s, the "
        f"larger of {args.context_parallel} ranks by {split.growth_bytes / MIB:.0f} MiB in {split.seconds:.0f} s: "
        f"{figures['growth']:.2f} times; gradients differ by {figures['gradient_difference']:.1e} of the largest"
    )
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
