"""PPO with a critic on several train engines, step by step: are the curves the same?

    .venv-megatron/bin/python -m benchmarks.ppo_engines      # torch, fsdp and megatron; runs that are done are kept

Every run starts from the same warmed-up policy with the same seed, in float32, and samples with the same rollout
engine: all that differs is who computes log-probs, values, gradients and optimizer steps of actor and critic. The
environment must have the engines that are asked for.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.recipes.commands import Metrics, rlsdk, run_steps
from benchmarks.recipes.task import Task, make_task, warm_up

TWO = ("--placement.devices_per_node", "2")
ENGINES: Mapping[str, Sequence[str]] = {
    "torch": (),
    "fsdp, 2 ranks": ("--train-backend", "fsdp", *TWO),
    "megatron": ("--train-backend", "megatron"),
    "megatron, TP 2": ("--train-backend", "megatron", *TWO, "--train.megatron.tensor_parallel", "2"),
    "megatron, PP 2": ("--train-backend", "megatron", *TWO, "--train.megatron.pipeline_parallel", "2"),
}
"""What is typed for each; the first is what the others are compared with."""
SAME_SAMPLES = 1e-5
"""Nats of mean log-prob, above what engines' rounding makes of it."""
METRICS = (
    "reward/mean", "policy/entropy", "policy/policy_loss", "policy/approx_kl", "policy/clip_fraction",
    "policy/grad_norm", "critic/loss", "critic/value_mean", "critic/explained_variance", "critic/grad_norm",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("benchmarks/results/ppo_engines"))
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/ppo_engines.json"))
    args = parser.parse_args()
    task = make_task(args.folder)
    warm_up(task, args.seed)
    kept = json.loads(args.json.read_text(encoding="utf-8")) if args.json.exists() else {}
    for engine in args.engines:
        if engine not in kept:
            kept[engine] = run(task, engine, args.steps, args.seed)
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(kept, indent=1), encoding="utf-8")
            first, last = kept[engine][0], kept[engine][-1]
            print(f"{engine}: reward {first['reward/mean']:.3f} to {last['reward/mean']:.3f}", flush=True)
    reference = next(iter(ENGINES))
    if reference not in kept:
        sys.exit(f"run {reference!r} as well: it is what the others are compared with")
    print(markdown({name: steps for name, steps in kept.items() if name in args.engines}, kept[reference], reference))


def run(task: Task, engine: str, steps: int, seed: int) -> list[Metrics]:
    """The compared metrics of each step."""
    name = engine.replace(", ", "-").replace(" ", "")
    flags = [
        *task.flags(seed), "--model", str(task.base(seed)), "--sft.steps", "0", "--algorithm", "ppo",
        "--trainer.prompts_per_step", "256", "--trainer.updates_per_step", "2", "--trainer.steps", str(steps),
        "--eval.every_steps", "null", "--critic.warmup_steps", "2", "--trainer.run_name", name,
        "--trainer.resume", "never", *ENGINES[engine],
    ]  # fmt: skip
    rlsdk("train", *flags, log=task.folder)
    return [{metric: step[metric] for metric in METRICS if metric in step} for step in run_steps(task.folder / name)]


def markdown(kept: Mapping[str, Sequence[Metrics]], reference: Sequence[Metrics], name: str) -> str:
    """A row for each metric: its values in the reference run, and each engine's largest difference while samples are
    the same, and over all steps."""
    others = {engine: steps for engine, steps in kept.items() if engine != name}
    same = {engine: same_samples(steps, reference) for engine, steps in others.items()}
    lines = [
        f"| metric | {name}: first to last step | {' | '.join(others)} |",
        f"|---|---|{'---|' * len(others)}",
        f"| steps with the same samples | {len(reference)} | {' | '.join(str(count) for count in same.values())} |",
    ]
    for metric in METRICS:
        values = [step[metric] for step in reference if metric in step]
        cells = [
            f"{difference(steps[: same[engine]], reference[: same[engine]], metric):.0e}, "
            f"{difference(steps, reference, metric):.0e}"
            for engine, steps in others.items()
        ]
        lines.append(f"| `{metric}` | {values[0]:.3g} to {values[-1]:.3g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def same_samples(steps: Sequence[Metrics], reference: Sequence[Metrics]) -> int:
    """Steps before the first with another sampled token: one moves the mean of 1,280 log-probs by far more."""
    pairs = zip(steps, reference, strict=True)
    apart = (at for at, (a, b) in enumerate(pairs) if abs(a["policy/entropy"] - b["policy/entropy"]) > SAME_SAMPLES)
    return next(apart, len(reference))


def difference(steps: Sequence[Metrics], reference: Sequence[Metrics], metric: str) -> float:
    """Largest over the steps.

    Raises:
        ValueError: one of the runs has the metric in a step in which the other lacks it.
    """
    if [metric in step for step in steps] != [metric in step for step in reference]:
        raise ValueError(f"{metric} is not in the same steps of both runs")
    return max(abs(a[metric] - b[metric]) for a, b in zip(steps, reference, strict=True) if metric in a)


if __name__ == "__main__":
    main()
