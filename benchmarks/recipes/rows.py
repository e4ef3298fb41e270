"""The rows of the table: what is run in each, and what it has to show."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.recipes.commands import Metrics, evaluate, rlsdk, run_evaluations, run_steps
from benchmarks.recipes.mismatched import install
from benchmarks.recipes.task import Task
from rlsdk.config.loading.recipes import recipe_names, recipe_text

SAMPLED, GREEDY = "eval/accuracy_sampled", "eval/accuracy_greedy"
PAIRS = "eval/accuracy_pairs"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one cell came to: figures on held-out words or pairs, before and after."""

    before: Metrics
    after: Metrics
    notes: Metrics = field(default_factory=dict)
    """Further figures of the run."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table; a cell is a row with a seed."""

    name: str
    run: Callable[[Task, int, Path], Outcome]
    """Called with the task, the seed and an empty folder."""
    measured: Sequence[str] = (SAMPLED, GREEDY)
    """Figures that are shown, before and after; the first must have risen."""


def rows() -> dict[str, Row]:
    """By name, the most telling ones first."""
    special = [
        Row(name="reward-model", run=train_on_reward_model),
        Row(name="dpo", run=train_dpo),
        Row(name="mismatched", run=partial(train_mismatched, correction="none")),
        Row(name="mismatched, corrected", run=partial(train_mismatched, correction="truncate")),
    ]
    first = ("ppo", "dapo", "remax")
    others = [name for name in recipe_names() if name not in first]
    found = [*map(recipe_row, first), *special, *map(recipe_row, others)]
    return {row.name: row for row in found}


PER_RECIPE: Mapping[str, Sequence[str]] = {
    # One sample a prompt: as many samples a step as the others have.
    "ppo": ("--trainer.prompts_per_step", "512"),
    "reinforce_plus_plus": ("--trainer.prompts_per_step", "512"),
    "remax": ("--trainer.prompts_per_step", "512"),
    # Room for answers that are too long, which begins to be punished two tokens before its end.
    "dapo": ("--rollout.max_response_tokens", "9", "--algorithm.lengths.soft_tokens", "2"),
}  # fmt: skip
"""Settings beside those of the task."""
TWO_UPDATES = ("--trainer.updates_per_step", "2")
"""A step, so that ratios differ from 1; not where a recipe asks for one."""
NOTED = ("rollout/rejected_groups", "reward/groups_with_signal", "critic/explained_variance", "policy/clip_fraction",
         "mismatch/kl_k3", "mismatch/ess_sequence")  # fmt: skip
"""Metrics whose mean over the last steps is kept."""
LAST = 10


def recipe_row(name: str) -> Row:
    """`rlsdk train --algorithm NAME` with nothing overridden but sizes."""

    def run(task: Task, seed: int, folder: Path) -> Outcome:
        flags = ["--algorithm", name, *PER_RECIPE.get(name, ())]
        if "updates_per_step" not in recipe_text(name):
            flags += TWO_UPDATES
        return train(task, seed, folder, *flags)

    return Row(name=name, run=run)


def train(task: Task, seed: int, folder: Path, *flags: str, path: Path | None = None) -> Outcome:
    """One run of `rlsdk train` from the seed's warmed-up model."""
    arguments = [*task.flags(seed), "--model", str(task.base(seed)), "--sft.steps", "0", *placed(folder, "rl"), *flags]
    rlsdk("train", *arguments, log=folder, path=path, in_process=task.in_process)
    before, *_, after = run_evaluations(folder / "rl")
    return Outcome(before=before, after=after, notes=means(run_steps(folder / "rl")))


def train_on_reward_model(task: Task, seed: int, folder: Path) -> Outcome:
    """Pairs to a model of scores; then its scores are all the reward, and the right answer is only counted."""
    model = ["--model", str(task.base(seed))]
    rlsdk("reward-model", *task.flags(seed, pairs=True), *model, *placed(folder, "scores"),
          "--preferences.center_coef", "0.01", log=folder, in_process=task.in_process)  # fmt: skip
    pairs = run_evaluations(folder / "scores")[-1]
    scores = f"[{{path: {folder / 'scores' / 'model'}}}]"
    counted = "[{name: exact, weight: 0.0}]"
    flags = ["--algorithm", "grpo", *TWO_UPDATES, "--reward_models", scores, "--rewards", counted]
    flags += ["--algorithm.kl_coef", "0.2"]
    found = train(task, seed, folder, *flags)
    return Outcome(before=found.before, after=found.after, notes={**found.notes, PAIRS: pairs[PAIRS]})


DPO = (
    "--preferences.lr",
    "1e-4",
    "--preferences.steps",
    "100",
    "--preferences.beta",
    "0.5",
    "--preferences.sft_coef",
    "0.2",
)
"""The two answers of a pair have most letters in common, so with the default beta of 0.1 the right one becomes less
likely together with the wrong one, and even then the supervised term is what holds it: docs/algorithm_figures.md."""


def train_dpo(task: Task, seed: int, folder: Path) -> Outcome:
    """Pairs to a policy; right answers are counted on the held-out words."""
    model = task.base(seed)
    flags = [*task.flags(seed), *placed(folder, "dpo"), *DPO]
    rlsdk("dpo", "--model", str(model), *flags, log=folder, in_process=task.in_process)
    measured = partial(evaluate, flags=task.flags(seed), folder=folder, in_process=task.in_process)
    pairs = run_evaluations(folder / "dpo")[-1]
    return Outcome(
        before=measured(model),
        after=measured(folder / "dpo" / "model"),
        notes={PAIRS: pairs[PAIRS]},
    )


def train_mismatched(task: Task, seed: int, folder: Path, correction: str) -> Outcome:
    """Samples come from an engine that serves other weights than it was given; held-out words are asked of one that
    does not."""
    found = train(
        task, seed, folder, *TWO_UPDATES, "--algorithm", "grpo", "--rollout-backend", "mismatched",
        "--algorithm.old_log_probs", "always", "--algorithm.correction.mode", correction,
        "--trainer.save_every_steps", "100000", "--trainer.parity_threshold", "100", path=install(folder),
    )  # fmt: skip
    measured = partial(evaluate, flags=task.flags(seed), folder=folder, in_process=task.in_process)
    (trained,) = (folder / "rl" / "checkpoints").glob("*/model")
    return Outcome(before=measured(task.base(seed)), after=measured(trained), notes=found.notes)


def placed(folder: Path, name: str) -> list[str]:
    return ["--trainer.run_dir", str(folder), "--trainer.run_name", name]


def means(steps: Sequence[Metrics]) -> dict[str, float]:
    """Of each metric that is noted, over those of the last steps that have it."""
    found = {}
    for name in NOTED:
        if values := [step[name] for step in steps[-LAST:] if name in step]:
            found[name] = sum(values) / len(values)
    return found
