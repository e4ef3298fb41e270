"""Do rewards hide behind generation?

    python -m benchmarks.reward_overlap --running 2    # generation takes longer than the rewards: they can hide
    python -m benchmarks.reward_overlap                # eight decoded at once: they take longer than it, and cannot
    python -m benchmarks.reward_overlap --staleness 1

The same run of `rlsdk train`, in turn with a reward that answers at once and with one that waits: actor and rollout
on a pool of one core each, an untrained model whose responses end anywhere, a few samples decoded at a time. The
samples are the same, so what a step takes longer is what the waiting costs. Waiting takes no processor: this is a
judge that is asked, or a test that runs elsewhere.

Not all of it can hide in a step that ends with its own grades: the last sample's reward begins when generation has
ended, and what all rewards together take longer than generation stands out: `unhidable_s`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.recipes.commands import rlsdk, run_steps
from benchmarks.recipes.task import make_task

REWARD = Path(__file__).with_name("slow_reward.py")
POOLS = (
    "--placement.pools", "{a: {devices_per_node: [1]}, b: {devices_per_node: [1]}}",
    "--placement.roles", "{actor: a, rollout: b}",
)  # fmt: skip
WARM_UP = 3
"""Steps that are not counted."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Medians over the steps of a run, in seconds."""

    step_s: float
    rollout_s: float
    """From the first request to the last sample."""
    reward_s: float
    """From the last sample to the last score: what nothing hides."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delay-ms", type=float, default=50.0)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--running", type=int, default=8, help="samples that are decoded at once")
    parser.add_argument("--graders", type=int, default=4)
    parser.add_argument("--staleness", type=int, default=0, help="steps that weights may be behind")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict[float, list[Figures]] = {0.0: [], args.delay_ms: []}
    with tempfile.TemporaryDirectory() as name:
        task = make_task(Path(name))
        flags = [
            *task.flags(0), "--model", str(task.folder / "model"), "--model.init_from_config", "true", *POOLS,
            "--sft.steps", "0", "--eval.every_steps", "null", "--rollout.max_response_tokens", "50",
            "--rollout.max_running_samples", str(args.running), "--trainer.steps", str(args.steps),
            "--trainer.prompts_per_step", str(args.prompts), "--reward_limits.num_workers", str(args.graders),
            "--schedule.max_staleness", str(args.staleness),
        ]  # fmt: skip
        for number in range(args.rounds):
            for delay, runs in found.items():
                runs.append(measure(flags, delay, task.folder, f"{number}-{delay:g}"))
                print(f"round {number + 1}, {delay:g} ms: {runs[-1]}", flush=True)
    print(report({delay: median(runs) for delay, runs in found.items()}, args.delay_ms, 8 * args.prompts, args.graders))
    if args.json:
        settings = {key: str(value) for key, value in vars(args).items()}
        runs_by_delay = {f"{delay:g} ms": [asdict(run) for run in runs] for delay, runs in found.items()}
        args.json.write_text(json.dumps({"settings": settings, "runs": runs_by_delay}, indent=1), encoding="utf-8")


def measure(flags: Sequence[str], delay_ms: float, folder: Path, name: str) -> Figures:
    """One run."""
    reward = f"[{{name: '{REWARD}:vowels', options: {{delay_s: {delay_ms / 1000}}}}}]"
    rlsdk("train", *flags, "--rewards", reward, "--trainer.run_name", name, log=folder)
    steps = run_steps(folder / name)[WARM_UP:]
    parts = {part: statistics.median(step[f"time/{part}"] for step in steps) for part in ("step_s", "rollout_s")}
    return Figures(**parts, reward_s=statistics.median(step.get("time/reward_s", 0.0) for step in steps))


def median(runs: Sequence[Figures]) -> Figures:
    rows = [asdict(run) for run in runs]
    return Figures(**{name: statistics.median(row[name] for row in rows) for name in rows[0]})


def unhidable_s(rollout_s: float, delay_s: float, samples: int, graders: int) -> float:
    """What no overlap within one step can hide, in seconds: the last sample's own reward, or what graders that are
    never idle take longer than generation."""
    return max(delay_s, samples * delay_s / graders - rollout_s)


def report(found: dict[float, Figures], delay_ms: float, samples: int, graders: int) -> str:
    """A table, what of the waiting was not hidden, and what could not be."""
    lines = ["| reward takes | step s | rollout s | reward after the last sample s |", "|---|---|---|---|"]
    lines += [f"| {d:g} ms | {f.step_s:.2f} | {f.rollout_s:.2f} | {f.reward_s:.2f} |" for d, f in found.items()]
    waiting, slow = samples * delay_ms / 1000 / graders, found[delay_ms]
    least = unhidable_s(slow.rollout_s, delay_ms / 1000, samples, graders)
    lines.append(
        f"{samples} samples of {delay_ms:g} ms by {graders} graders are {waiting:.2f} s of waiting. "
        f"{slow.reward_s:.2f} s of it came after the last sample, where without staleness {least:.2f} s must; a step "
        f"took {slow.step_s - found[0.0].step_s:.2f} s longer"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
