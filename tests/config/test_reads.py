"""Values that a command does not read: refused where they were typed for it, named where a file holds them."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from rlsdk.config.checks.commands import READERS
from rlsdk.config.introspection.describe import option_paths
from rlsdk.config.loading.foreign_names import FOREIGN_NAMES
from rlsdk.config.loading.load import PACKAGE, read_config
from rlsdk.config.loading.reads import unread
from rlsdk.config.sections.schema import RunConfig
from rlsdk.registry import Registry

HERE = str(Path(__file__).parent)


def said(
    command: str, registry: Registry, flags: list[str], file: Path | None = None, values: dict[str, Any] | None = None
) -> tuple[list[str], list[str]]:
    reader = READERS[command]
    loaded = read_config([] if file is None else [file], flags, registry, values=values, reader=reader)
    problems, lines = unread(loaded.given, loaded.config, reader, loaded.problems, loaded.idle)
    return [str(problem) for problem in problems], lines


@pytest.mark.parametrize(
    ("command", "flags", "expected"),
    [
        (
            "dpo",
            ["--train.optim.lr", "1e-3"],
            "reads preferences.lr: `--preferences.lr 0.001` (--train.optim.lr)",
        ),
        ("dpo", ["--steps", "3"], "which reads preferences.steps: `--preferences.steps 3` (--steps)"),
        ("dpo", ["--algorithm.kl_coef", "0.1"], "`--preferences.beta 0.1`"),
        ("dpo", ["--preferences.margin_field", "m"], "has no effect on `rlsdk dpo`"),
        ("reward-model", ["--preferences.beta", "0.2"], "has no effect on `rlsdk reward-model`"),
        ("sft", ["--train.optim.lr", "1e-3"], "`--sft.lr 0.001`"),
        ("sft", ["--train.optim.schedule", "cosine"], "`--sft.schedule cosine`"),
        ("sft", ["--train.optim.warmup_ratio", "0.1"], "`--sft.warmup_ratio 0.1`"),
        ("sft", ["--train.optim.min_lr_ratio", "0.1"], "sft.schedule is 'constant'"),
        (
            "sft",
            ["--sft.warmup_ratio", "0.1", "--sft.warmup_steps", "3"],
            "sft.warmup_steps: has no effect on `rlsdk sft`: warmup_ratio is 0.1",
        ),
        ("dpo", ["--preferences.warmup_ratio", "0.1", "--preferences.warmup_steps", "3"], "warmup_ratio is 0.1"),
        ("train", ["--train.optim.warmup_ratio", "0.1", "--train.optim.warmup_steps", "3"], "warmup_ratio is 0.1"),
        ("train", ["--eval.top_p", "0.9", "--eval.samples_per_prompt", "0"], "eval.samples_per_prompt is 0"),
        ("sft", ["--reward", "gsm8k"], "rewards: has no effect on `rlsdk sft`, which does not read it; leave it out"),
        ("sft", ["--algorithm", "grpo"], "algorithm.recipe: has no effect"),
        ("sft", ["--train.ema_decay", "0.9"], "has no effect"),
        ("sft", ["--rollout.temperature", "0.5"], "has no effect"),
        ("train", ["--preferences.lr", "1.0"], "`--train.optim.lr 1.0`"),
        ("train", ["--critic.warmup_steps", "3"], "algorithm.advantage 'grpo' needs no critic"),
        ("train", ["--algorithm", "grpo", "--critic.optim.lr", "1e-3"], "needs no critic"),
        ("train", ["--ref.micro_batch_rows", "2"], "algorithm.kl_coef is 0"),
        ("train", ["--sft.lr", "1e-3"], "sft.steps is 0"),
        ("train", ["--steps", "3", "--trainer.epochs", "1"], "trainer.epochs is 1"),
        ("train", ["--algorithm.correction.upper", "3"], "algorithm.correction.mode is 'none'"),
        ("train", ["--algorithm.lengths.soft_factor", "3"], "soft_tokens is null"),
        ("train", ["--algorithm.dynamic_sampling.max_groups", "2"], "enabled is false"),
        ("train", ["--train.optim.min_lr_ratio", "0.1"], "train.optim.schedule is 'constant'"),
        ("train", ["--faults.replica_restarts", "1"], "the rollout shares its devices"),
        ("train", ["--eval.every_steps", "null", "--eval.greedy", "false"], "eval.every_steps is null"),
        ("train", ["--placement.forward_env", "[A]"], "placement.ray_address is null"),
        ("train", ["--eval.every_steps", "null", "--data.num_eval_rows", "8"], "eval.every_steps is null"),
        ("sft", ["--eval.every_steps", "null", "--data.eval", "a.jsonl"], "eval.every_steps is null"),
        ("dpo", ["--eval.every_steps", "null", "--data.num_eval_rows", "8"], "eval.every_steps is null"),
        (
            "train",
            ["--eval.sets", "{a: {data: a.jsonl}}", "--data.num_eval_rows", "8"],
            "each of eval.sets has rows of its own",
        ),
        ("eval", ["--eval.sets", "{a: {data: a.jsonl}}", "--data.eval", "b.jsonl"], "has rows of its own"),
        ("train", ["--model", HERE, "--model.revision", "v1"], "is a folder, and only a name on the hub has revisions"),
        ("dpo", ["--model", HERE, "--ref.revision", "v1"], "ref.revision: has no effect on `rlsdk dpo`: its path"),
        (
            "train",
            ["--reward_models", f"[{{path: '{HERE}', revision: v1}}]"],
            "reward_models.0.revision: has no effect",
        ),
        ("eval", ["--rollout.temperature", "0.5"], "`--eval.temperature 0.5`"),
        ("eval", ["--rollout.top_p", "0.5"], "`--eval.top_p 0.5`"),
        ("eval", ["--trainer.samples_per_prompt", "2"], "`--eval.samples_per_prompt 2`"),
        ("eval", ["--model", "m"], "the model is the one at PATH"),
        ("eval", ["--train.optim.lr", "1e-3"], "has no effect on `rlsdk eval`"),
        ("generate", ["--eval.temperature", "0.5"], "`--rollout.temperature 0.5`"),
        ("generate", ["--reward", "gsm8k"], "has no effect on `rlsdk generate`"),
        ("reward serve", ["--rollout.top_k", "3"], "has no effect on `rlsdk reward serve`"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_flag_that_nothing_reads_is_refused_and_names_what_acts(
    command: str, flags: list[str], expected: str, registry: Registry
) -> None:
    (problem,), lines = said(command, registry, flags)
    assert expected in problem
    assert not lines


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("dpo", ["--preferences.lr", "1e-3", "--ref.micro_batch_rows", "2", "--train.optim.betas", "[0.9, 0.9]"]),
        ("sft", ["--sft.steps", "3", "--rollout.max_response_tokens", "9", "--data.shuffle", "false"]),
        ("train", ["--algorithm", "ppo", "--critic.optim.lr", "1e-3", "--algorithm.value_clip", "0.1"]),
        ("train", ["--algorithm.kl_coef", "0.1", "--ref.micro_batch_rows", "2", "--algorithm.kl_estimator", "k2"]),
        ("train", ["--sft.steps", "3", "--sft.lr", "1e-3"]),
        ("train", ["--sft.steps", "3", "--sft.schedule", "cosine", "--train.optim.min_lr_ratio", "0.1"]),
        ("train", ["--placement.preset", "disaggregated", "--faults.replica_restarts", "1"]),
        ("train", ["--algorithm.name", "own.py:Own", "--algorithm.kl_estimator", "k2"]),
        ("train", ["--model", HERE, "--model.tokenizer", "a/b", "--model.revision", "v1"]),
        ("train", ["--model", "n" * 300, "--model.revision", "v1"]),
        ("train", ["--eval.sets", "{a: {data: a.jsonl}, b: {}}", "--data.num_eval_rows", "8"]),
        ("eval", ["--eval.temperature", "0.5", "--rollout.max_response_tokens", "9", "--reward", "gsm8k"]),
        ("generate", ["--rollout.temperature", "0.5", "--data.prompt_template", "{prompt}"]),
        ("reward serve", ["--reward_limits.timeout_s", "3"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_flag_that_acts_is_no_problem(command: str, flags: list[str], registry: Registry) -> None:
    assert said(command, registry, flags) == ([], [])


def test_a_keyword_of_a_call_is_refused_as_a_flag_is(registry: Registry) -> None:
    (problem,), _ = said("dpo", registry, [], values={"train": {"optim": {"lr": 0.5, "eps": 1e-6}}})
    assert "`--preferences.lr 0.5`" in problem
    assert problem.endswith("(the call)")


def test_a_file_may_serve_several_commands_and_each_says_what_it_leaves_out(tmp_path: Path, registry: Registry) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "rewards: [gsm8k]\ntrain: {optim: {lr: 1.0e-3, eps: 1.0e-6}}\ntrainer: {steps: 5, seed: 3}\n"
        "sft: {steps: 4, lr: 1.0e-3}\ncritic: {warmup_steps: 0}\nalgorithm: {kl_coef: 0.0}\n"
    )
    problems, lines = said("sft", registry, [], file)
    assert not problems
    assert lines == [f"{file}: `rlsdk sft` does not read rewards, train.optim.lr, trainer.steps"]
    assert said("train", registry, [], file) == ([], []), "a default is no setting"


def test_what_a_recipe_sets_is_nobodys_mistake(registry: Registry) -> None:
    flags = ["--algorithm", "ppo", "--algorithm.advantage", "grpo", "--trainer.samples_per_prompt", "4"]
    assert said("train", registry, flags) == ([], [])


@pytest.mark.parametrize(
    ("command", "name", "expected"),
    [
        ("dpo", "beta", ["preferences.beta"]),
        ("train", "beta", ["algorithm.kl_coef"]),
        ("sft", "learning_rate", ["sft.lr"]),
        ("dpo", "learning_rate", ["preferences.lr"]),
        ("train", "learning_rate", ["train.optim.lr", "critic.optim.lr"]),
        ("dpo", "max_steps", ["preferences.steps"]),
        ("sft", "batch_size", ["sft.rows_per_step"]),
        ("train", "batch_size", ["trainer.prompts_per_step"]),
    ],
)
def test_hints_name_only_fields_that_act_on_the_command(
    command: str, name: str, expected: list[str], registry: Registry
) -> None:
    (problem,), _ = said(command, registry, [f"--{name}", "1"])
    assert problem == f"{name}: unknown key; did you mean {' or '.join(expected)}? (--{name})"


def test_the_tables_name_fields_that_exist() -> None:
    known = set(option_paths(RunConfig))
    known |= {".".join(path.split(".")[:at]) for path in known for at in range(1, path.count(".") + 1)}
    named = {path for choices in FOREIGN_NAMES.values() for choice in choices for path in choice}
    for reader in READERS.values():
        named |= {*reader.fields, *reader.but, *reader.instead}
        named |= {problem.path for problem in reader.unused(RunConfig())}
    assert named <= known


def test_flags_that_messages_name_are_fields() -> None:
    known = set(option_paths(RunConfig))
    known |= {".".join(path.split(".")[:at]) for path in known for at in range(1, path.count(".") + 1)}
    wrong = []
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                flags = re.findall(r"--([a-z_]+(?:\.[a-z_]+)+)(?![\w.{])", node.value)
                wrong += [(file.name, flag) for flag in flags if flag not in known and flag not in NO_FIELDS]
    assert not wrong


NO_FIELDS = ("a.b",)
