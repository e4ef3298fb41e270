"""Adapters beside full weights: `python -m benchmarks.lora --folder RUNS [--steps 60] [--seeds 3]`, and what a sync of
the adapter alone takes beside one of merged weights: `python -m benchmarks.lora --folder RUNS --syncs`; one step off
policy, versions of an adapter beside all weights, which wait for samples: `--pauses`.

The quickstart's model is first trained with all weights by `rlsdk sft` on the quickstart's own rows: below an adapter
its random weights would stay frozen. From that base, reinforcement learning with adapters of ranks 1, 8 and 32, at ten
times the learning rate, and with all weights. Runs that are in the folder already are not made again.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from rich.console import Console
from rich.table import Table

from rlsdk.config import RunConfig
from rlsdk.config.sections.data import DataConfig
from rlsdk.interfaces import AdapterSpec, ModelSpec, OptimSpec, RankContext, TrainSpec, Workload
from rlsdk.kit.model.adapters import adapter_shapes
from rlsdk.kit.model.hf import build_model
from rlsdk.reference.forecast import forecast_training
from rlsdk.testing.process.models import write_tiny_model
from rlsdk.trainer.runs.quickstart import TASK, make_model
from rlsdk.trainer.tracking.trackers import read_metrics

RECIPE = Path(__file__).parents[1] / "rlsdk" / "trainer" / "recipes" / "quickstart.yaml"
RATE = 3e-4
"""Learning rate of the quickstart, for all weights; adapters get ten times as much."""
ROW_TOKENS, UPDATE_ROWS = 14, 128
LARGER: dict[str, Any] = {"hidden_size": 768, "intermediate_size": 2048, "layers": 12, "num_attention_heads": 24}
"""Shape of the model whose syncs are measured."""
SYNCS = 6
PUBLISHED = ("sync/bytes", "time/publish_lag_s", "time/publish_s", "time/rollout_idle_share")
LAST = 10
"""Steps at the end whose mean stands in the table."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    rank: int
    """0: all weights."""

    @property
    def name(self) -> str:
        return f"rank {self.rank}" if self.rank else "all weights"

    @property
    def adapter(self) -> AdapterSpec | None:
        return AdapterSpec(rank=self.rank) if self.rank else None

    @property
    def flags(self) -> list[str]:
        rate = 10 * RATE if self.rank else RATE
        return ["--train.optim.lr", str(rate), *(["--model.lora.rank", str(self.rank)] if self.rank else [])]


VARIANTS = tuple(Variant(rank=rank) for rank in (0, 1, 8, 32))


def rlsdk(*arguments: str) -> None:
    """Runs a command.

    Raises:
        RuntimeError: it failed, with what it said.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "rlsdk.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{arguments} failed ({done.returncode}):\n{(done.stdout + done.stderr)[-4000:]}")


def base_model(folder: Path, steps: int) -> Path:
    """The quickstart's model after supervised training of all weights."""
    if not (folder / "sft" / "model" / "config.json").is_file():
        start = make_model(RunConfig(data=DataConfig(train=TASK)), folder).model.path
        rlsdk(
            "sft", "--model", str(start), "--model.init_from_config", "true", "--data", TASK,
            "--data.options", "{size: 12000, seed: 42}", "--data.prompt_template", "{metadata.word}>",
            "--data.max_prompt_tokens", "8", "--data.num_eval_rows", "512", "--rollout.max_response_tokens", "6",
            "--sft.steps", str(steps), "--sft.rows_per_step", "64", "--sft.lr", "1e-3", "--sft.warmup_steps", "10",
            "--train.optim.betas", "[0.9, 0.99]", "--tracking.trackers", "[jsonl]", "--trainer.run_dir", str(folder),
            "--trainer.run_name", "sft",
        )  # fmt: skip
    return folder / "sft" / "model"


def run(variant: Variant, seed: int, steps: int, base: Path, folder: Path) -> list[Mapping[str, float]]:
    """The metrics of one run, which is made where it is not there yet."""
    name = f"{variant.name.replace(' ', '_')}_{seed}"
    if len(found := _steps(folder / name)) >= steps:
        return found
    rlsdk(
        "train", "--config", str(RECIPE), "--model", str(base), "--sft.steps", "0", "--trainer.seed", str(seed),
        "--trainer.steps", str(steps), *variant.flags, "--placement.cpus_per_device", "1",
        "--eval.every_steps", str(steps), "--tracking.trackers", "[jsonl]", "--schedule.journal", "none",
        "--trainer.resume", "never", "--trainer.run_dir", str(folder), "--trainer.run_name", name,
    )  # fmt: skip
    return _steps(folder / name)


def _steps(folder: Path) -> list[Mapping[str, float]]:
    return [m for m in read_metrics(folder) if "reward/accuracy" in m]


def held_out(folder: Path) -> tuple[float, float]:
    """Greedy accuracy on held-out prompts before the first and after the last step."""
    found = [m["eval/accuracy_greedy"] for m in read_metrics(folder) if "eval/accuracy_greedy" in m]
    return found[0], found[-1]


def memory(variant: Variant, base: Path) -> tuple[int, int, int]:
    """(trained parameters, bytes of weights, bytes of gradients and optimizer) of the actor, float32."""
    model = ModelSpec(path=str(base), adapter=variant.adapter)
    spec = TrainSpec(model=model, optim=OptimSpec(), micro_batch_tokens=32768)
    load = Workload(row_tokens=ROW_TOKENS, update_rows=UPDATE_ROWS, running_rows=1)
    (found,) = forecast_training([RankContext(role="actor")], spec, load).memory
    empty = build_model(model, empty=True)
    shapes = {n: tuple(p.shape) for n, p in empty.named_parameters()}
    trained = shapes if variant.adapter is None else adapter_shapes(empty, variant.adapter)
    numel = sum(_product(shape) for shape in trained.values())
    return numel, found.weights_bytes or 0, (found.optimizer_bytes or 0) + (found.gradients_bytes or 0)


def _product(shape: Sequence[int]) -> int:
    size = 1
    for part in shape:
        size *= part
    return size


def checkpoint_bytes(folder: Path) -> int:
    """Size of the actor's part of the newest checkpoint."""
    newest = sorted((folder / "checkpoints").glob("step_*"))[-1]
    return sum(file.stat().st_size for file in (newest / "actor").rglob("*") if file.is_file())


def larger_model(folder: Path) -> str:
    """A model of the size of `LARGER` with random weights, in bfloat16."""
    model = folder / "larger"
    if not (model / "config.json").is_file():
        write_tiny_model(model, stored="bfloat16", **LARGER)
    return str(model)


def train_larger(folder: Path, name: str, *more: str) -> list[Mapping[str, float]]:
    """Metrics of a run between two processes, which is made where it is not there yet."""
    if len(_steps(folder / name)) < SYNCS:
        rlsdk(
            "train", "--model", larger_model(folder), "--data", TASK, "--data.options", "{size: 200, seed: 1}",
            "--data.max_prompt_tokens", "64", "--reward", "reasoning_gym", "--model.dtype", "bfloat16",
            "--placement.preset", "disaggregated", "--placement.devices_per_node", "2", "--eval.every_steps", "null",
            "--tracking.trackers", "[jsonl]", "--schedule.journal", "none", "--trainer.steps", str(SYNCS),
            "--trainer.resume", "never", "--trainer.save_every_steps", "null", "--trainer.run_dir", str(folder),
            "--trainer.run_name", name, *more,
        )  # fmt: skip
    return _steps(folder / name)


def show_pauses(folder: Path) -> None:
    """What a publish takes one step off policy: of all weights, which waits for samples, and of an adapter."""
    table = Table(title=f"One step off policy, bfloat16, `transformers`: medians of {SYNCS - 2} publishes")
    for column in ("published", "MB", "on its way, s", "replica stands, s", "rollout waits"):
        table.add_column(column, justify="left" if column == "published" else "right")
    load = (
        "--schedule.max_staleness", "1", "--trainer.prompts_per_step", "2", "--trainer.samples_per_prompt", "4",
        "--rollout.max_response_tokens", "48", "--train.micro_batch_tokens", "512",
    )  # fmt: skip
    adapter = ("--model.lora.rank", "16", "--model.lora.sync", "adapter", "--train.optim.lr", "1e-3")
    for name, flags in {"all weights": ("--train.optim.lr", "1e-4"), "adapter, rank 16": adapter}.items():
        steps = train_larger(folder, f"pauses_{len(flags)}", *load, *flags)[2:]
        found = {key: median(step[key] for step in steps) for key in PUBLISHED}
        table.add_row(
            name,
            f"{found['sync/bytes'] / 1e6:.2f}",
            *(f"{found[key]:.3f}" for key in ("time/publish_lag_s", "time/publish_s")),
            f"{found['time/rollout_idle_share']:.0%}",
        )
    Console(width=150).print(table)


def syncs(folder: Path, backend: str) -> list[tuple[str, Mapping[str, float], list[Mapping[str, float]]]]:
    """(`model.lora.sync`, metrics of the first sync, of the later ones) of runs between two processes, of a model of
    the size of `LARGER` with random weights, in bfloat16."""
    found = []
    for sync in ("merged", "adapter"):
        first, *later = train_larger(
            folder, f"sync_{backend}_{sync}", "--trainer.prompts_per_step", "2", "--trainer.samples_per_prompt", "2",
            "--rollout.max_response_tokens", "4", "--model.lora.rank", "16", "--model.lora.sync", sync,
            "--train.optim.lr", "1e-3", "--rollout-backend", backend, "--train.micro_batch_tokens", "512",
        )  # fmt: skip
        found.append((sync, first, later))
    return found


def show_syncs(folder: Path) -> None:
    """The table of `syncs`, of the rollout backends that are installed here."""
    table = Table(title=f"Syncs between two processes, bfloat16, rank 16: first, and median of {SYNCS - 1} later ones")
    for name in ("rollout", "sync", "first, MB", "later, MB", "first, s", "later, s"):
        table.add_column(name, justify="right")
    for backend in [name for name in ("transformers", "vllm") if name == "transformers" or find_spec("vllm")]:
        for sync, first, later in syncs(folder, backend):
            table.add_row(
                backend,
                sync,
                *(f"{value / 1e6:.2f}" for value in (first["sync/bytes"], later[-1]["sync/bytes"])),
                *(f"{v:.3f}" for v in (first["time/sync_s"], median(m["time/sync_s"] for m in later))),
            )
    Console(width=150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--base-steps", type=int, default=100)
    parser.add_argument("--syncs", action="store_true")
    parser.add_argument("--pauses", action="store_true")
    given = parser.parse_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if given.pauses:
        return show_pauses(folder)
    if given.syncs:
        return show_syncs(folder)
    base = base_model(folder, given.base_steps)
    table = Table(title=f"{given.steps} steps, {given.seeds} seeds, from one base; adapters at 10 x the learning rate")
    for name in ("trained", "parameters", f"accuracy, last {LAST}", "held-out: before", "after", "step, s",
                 "weights, MB", "gradients + optimizer, MB", "checkpoint, MB"):  # fmt: skip
        table.add_column(name, justify="left" if name == "trained" else "right")
    for variant in VARIANTS:
        runs = [run(variant, seed, given.steps, base, folder) for seed in range(given.seeds)]
        folders = [folder / f"{variant.name.replace(' ', '_')}_{seed}" for seed in range(given.seeds)]
        before, after = zip(*map(held_out, folders), strict=True)
        numel, weights, others = memory(variant, base)
        table.add_row(
            variant.name,
            f"{numel:,}",
            _spread([mean(m["reward/accuracy"] for m in each[-LAST:]) for each in runs]),
            f"{mean(before):.3f}",
            _spread(after),
            f"{mean(m['time/step_s'] for each in runs for m in each[2:]):.2f}",
            f"{weights / 1e6:.1f}",
            f"{others / 1e6:.2f}",
            f"{checkpoint_bytes(folders[0]) / 1e6:.2f}",
        )
    Console(width=150).print(table)
    return None


def _spread(values: Sequence[float]) -> str:
    return f"{mean(values):.3f}" + (f" ({stdev(values):.3f})" if len(values) > 1 else "")


if __name__ == "__main__":
    main()
