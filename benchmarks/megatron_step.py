"""Seconds of one optimizer step of the backend `megatron`, against a bare loop over the same Megatron-Core model.

    python benchmarks/megatron_step.py --tensor-parallel 2

Both sides run the same stages, buffers and optimizer on the same rows: the bare loop calls Megatron's schedule with
its own loss on every token, then its optimizer, and nothing else. The engine's objective weighs every token, so both
compute the same logits. Processes and weights are the same for both; the best of several steps counts, taken in turn.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlsdk.interfaces import Batch, ModelSpec, Objective, ObjectiveResult, OptimSpec, RankContext, TrainSpec
from rlsdk.kit.ranks.rendezvous import hold_port
from rlsdk.testing.process.models import write_tiny_model


@dataclass(frozen=True)
class MeanLoss:
    """Cross entropy over all tokens but the first of each row."""

    num_tokens: int
    outputs: Sequence[str] = ("log_probs",)

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> ObjectiveResult:
        return ObjectiveResult(loss=-outputs["log_probs"].sum() / self.num_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128, help="of each row")
    parser.add_argument("--micro-batch-rows", type=int, default=4)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--pipeline-parallel", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", type=Path, help="where figures are written")
    args = parser.parse_args()
    world = args.tensor_parallel * args.pipeline_parallel
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(
            Path(folder) / "model",
            vocab_size=args.vocabulary,
            hidden_size=args.hidden,
            intermediate_size=2 * args.hidden,
            head_dim=args.hidden // 4,
            layers=args.layers,
        )
        context = multiprocessing.get_context("spawn")
        ports, answers = context.Queue(), context.Queue()
        ranks = [
            context.Process(target=run_rank, args=(rank, world, args, str(model), ports, answers))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        found = answers.get(timeout=600)
        for process in ranks:
            process.join(60)
    figures = {name: min(seconds) for name, seconds in found.items()}
    ratio = figures["engine"] / figures["bare"]
    print(f"bare {figures['bare'] * 1e3:.1f} ms, engine {figures['engine'] * 1e3:.1f} ms a step: {ratio:.3f} times")
    if args.json:
        args.json.write_text(json.dumps({**figures, "ratio": ratio, "world": world}, indent=1) + "\n")


def run_rank(rank: int, world: int, args: Any, model: str, ports: Any, answers: Any) -> None:
    """One process: the engine's step and the bare one in turn."""
    from rlsdk_megatron.config import MegatronOptions
    from rlsdk_megatron.engine import MegatronTrainEngine

    torch.set_num_threads(1)
    if rank == 0:
        port = hold_port("127.0.0.1")
        for _ in range(world - 1):
            ports.put(port)
    else:
        port = ports.get(timeout=120)
    engine = MegatronTrainEngine()
    engine.initialize(
        RankContext(role="actor", rank=rank, world_size=world, local_rank=rank, master_port=port),
        TrainSpec(
            model=ModelSpec(path=model),
            optim=OptimSpec(lr=1e-4),
            micro_batch_rows=args.micro_batch_rows,
            options=MegatronOptions(tensor_parallel=args.tensor_parallel, pipeline_parallel=args.pipeline_parallel),
        ),
    )
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(3, args.vocabulary, (args.rows, args.tokens), generator=generator)
    batch = Batch.from_rows(rows.tolist())
    objective = MeanLoss(args.rows * (args.tokens - 1))
    steps: dict[str, Callable[[], None]] = {
        "bare": bare_step(engine, rows, args.micro_batch_rows),
        "engine": lambda: engine_step(engine, batch, objective),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(args.repeats + 2):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if repeat >= 2:  # caches are warm, buffers are there
                seconds[name].append(time.perf_counter() - start)
    if rank == 0:
        answers.put(seconds)
    engine.close()


def engine_step(engine: Any, batch: Batch, objective: Objective) -> None:
    engine.forward_backward(batch, objective)
    engine.optim_step()


def bare_step(engine: Any, rows: Tensor, micro_batch_rows: int) -> Callable[[], None]:
    """What a training script of Megatron-Core does in a step, on the engine's own model."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from rlsdk_megatron.cpu_shim import device_scope
    from rlsdk_megatron.modeling import Stage

    length = rows.shape[1]
    positions = torch.arange(length)
    future = torch.ones(1, 1, length, length, dtype=torch.bool).triu_(1)
    weight = torch.ones_like(rows, dtype=torch.float32)
    weight[:, -1] = 0.0
    labels = torch.roll(rows, -1, 1)
    total = float(weight.sum())

    def forward(parts: Iterator[tuple[Tensor, Tensor, Tensor]], module: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        ids, targets, share = next(parts)

        def loss(per_token: Tensor) -> Any:
            value = (per_token * share).sum() / total
            return value, torch.zeros((), dtype=torch.int), {"loss": value.detach()}

        return module(ids, positions.expand_as(ids), future, labels=targets), loss

    def step() -> None:
        parts = list(zip(*(torch.split(t, micro_batch_rows) for t in (rows, labels, weight)), strict=True))
        for stage in engine.stages:
            stage.__class__ = GPTModel
        with device_scope(engine.device):
            for module in engine.modules:
                module.zero_grad_buffer()
            engine.optimizer.zero_grad()
            get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=iter(parts),
                model=list(engine.modules),
                num_microbatches=len(parts),
                seq_length=length,
                micro_batch_size=micro_batch_rows,
                forward_only=False,
            )
            engine.optimizer.step()
        for stage in engine.stages:
            stage.__class__ = Stage

    return step


if __name__ == "__main__":
    main()
