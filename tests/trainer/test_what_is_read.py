"""What a command is said to read is what a run of it reads, on real engines in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pair_runs
import pytest
import test_loop
from reading import Reads, recorded
from test_loop import Recorder, config_of, model, registry

from rlsdk.config import PairTraining, RunConfig, sft_optim_spec, with_dtype
from rlsdk.config.checks.commands import (
    DISTILL,
    DPO,
    EVAL_FIGURES,
    GENERATE,
    GENERATE_KEPT,
    KTO,
    PROCESS_REWARD,
    REWARD_MODEL,
    SFT,
    TRAIN,
)
from rlsdk.config.derived.roles import rollout_role
from rlsdk.config.introspection.describe import option_paths
from rlsdk.config.loading.reads import Reader
from rlsdk.config.sections.base import unused_in
from rlsdk.config.sections.role_kinds import ROLLOUT
from rlsdk.registry import Registry
from rlsdk.testing.roles.in_process import InProcessStore, start_in_process
from rlsdk.trainer.roles.device_turns import DeviceTurns
from rlsdk.trainer.roles.placement import placed, placement_of, roles
from rlsdk.trainer.roles.role_group import RoleGroup
from rlsdk.trainer.roles.session import Session, start_roles
from rlsdk.trainer.runs import inference, keep
from rlsdk.trainer.runs.build_supervised import distill_stage, sft_stage
from rlsdk.trainer.runs.keep_rules import KeepRule
from rlsdk.trainer.runs.run_inputs import build_run_inputs
from rlsdk.trainer.stages.loop import Trainer

__all__ = ["model", "registry"]

WITHOUT_EFFECT: Mapping[str, str] = {
    "actor_role": "its optimizer is replaced by that of the command",
    "sft_optim_spec": "of a copy with the rate and schedule of the command",
    "preference_optim_spec": "the same",
    "sampling_params": "nothing is sampled",
    "measures": "the held-out rows are one measure, without sampling",
    "eval_options": "no samples are saved",
    "_counted": "the steps of a stage that is not part of the command",
    "with_steps": "the same",
    "needs_values": "whether there is a critic, which is not part of the command",
    "_eval_prompts": "the name of a set",
    "build_run_inputs": "callbacks are built, and not called",
    "is_asked": "whether there is a warm start",
    "with_teacher": "handed on with a batch of which the output does not read it",
    "_check_service": "the same",
    "_share_of_teacher": "the divergence is not that of the mean",
    "_pairs": "a field of the other command with pairs is handed on",
}
"""Functions that read a field in supervised training without an effect, and why."""
SAMPLED: Mapping[str, str] = {
    "sampling_params": "replaced by what the evaluation says",
    "_eval_prompts": "the name of a set, where rows are held out",
}
"""Functions that read a field without an effect on samples that nothing is trained on, and why."""
HANDED_ON = {
    "train.optim.min_lr_ratio": "with the schedule", "faults.replica_restarts": "with the session",
    "algorithm.kl_estimator": "with kl_coef", "algorithm.kl_reward_estimator": "with kl_in_reward",
    "tracking.tokens_per_sample": "with samples_per_step", "model.revision": "with the path",
    "ref.revision": "with the path", "critic.revision": "with the path", "model.path": "the argument of `eval`",
    "model.lora.path": "the argument of `eval`", "model.lora": "with the model", "model.lora.sync": "with its rank",
}  # fmt: skip
"""Fields that are handed on where another field says that they have no effect."""
LAUNCHED = {
    "placement": "of the cluster", "deadlines": "of calls to other processes", "faults": "of other processes",
    "checkpoint.background": "of a run with processes", "tracking": "none here", "trainer.run_dir": "of the folder",
    "trainer.run_name": "of the folder", "trainer.resume": "of the folder", "trainer.keep_checkpoints": "given",
    "data.mixture": "in place of data.train", "data.eval_options": "of data.eval", "trainer.callbacks": "none here",
    "rewards": "items of a list", "reward_models": "items of a list",
    "teachers": "items of a list", "eval.best_of": "a model of its own", "eval.sets": "items of a mapping",
    "eval.early_stopping": "of a metric", "checkpoint.best": "of a metric",
    "model.init_from_config": "no weights are made", "algorithm.recipe": "said by the command",
    "algorithm.roles": "of own algorithms", "tracking.samples_per_step": "", "algorithm.ptx": "of answers",
    "train.engine_kwargs": "", "schedule.order": "of stale runs", "schedule.uncorrected": "of stale runs",
}  # fmt: skip
"""Fields of which a tiny run without processes is no witness."""


def sft(config: RunConfig, registry: Registry, folder: Path) -> None:
    folder.mkdir()
    turns = DeviceTurns()
    table = [role.with_optim(sft_optim_spec(config)) for role in roles(config, "cpu", needed=["actor"])]
    groups = start_roles(table, lambda role: start_in_process(role, registry), turns)
    session = Session(roles=groups, turns=turns, cluster=InProcessStore())
    with closing(build_run_inputs(config, registry, folder, Recorder(), rewarded=False)) as run_inputs:
        stage = sft_stage(config, run_inputs, session, measured=True)
        with closing(stage):
            Trainer(stage, session, tokenizer=run_inputs.tokenizer, config_text="", keep_checkpoints=1).fit()


def distill(config: RunConfig, registry: Registry, folder: Path) -> None:
    folder.mkdir()
    turns = DeviceTurns()
    actor, teacher = roles(config, "cpu", needed=["actor", "teacher"])
    table = [actor.with_optim(sft_optim_spec(config)), teacher]
    groups = start_roles(table, lambda role: start_in_process(role, registry), turns)
    session = Session(roles=groups, turns=turns, cluster=InProcessStore())
    with closing(build_run_inputs(config, registry, folder, Recorder(), rewarded=False, taught=True)) as run_inputs:
        stage = distill_stage(config, run_inputs, session, measured=True)
        with closing(stage):
            Trainer(stage, session, tokenizer=run_inputs.tokenizer, config_text="", keep_checkpoints=1).fit()


def train(config: RunConfig, registry: Registry, folder: Path) -> None:
    test_loop.run(config, registry, folder)


def pairs(kind: PairTraining) -> Callable[[RunConfig, Registry, Path], None]:
    return lambda config, registry, folder: pair_runs.run(config, kind, registry, folder) and None


def check(reads: Reads, config: RunConfig, reader: Reader, ignored: Mapping[str, str]) -> None:
    """No field that is said to be unread is read, and every other one is."""
    unused = {problem.path for problem in (*unused_in(config), *reader.unused(config))}

    def is_read(path: str) -> bool:
        return reader.may_read(path) and not any(f"{path}.".startswith(f"{known}.") for known in unused)

    read = {path: by - ignored.keys() for path, by in reads.items() if path not in HANDED_ON}
    wrong = {path: by for path, by in read.items() if not is_read(path) and by}
    assert not wrong, "read, and said to be unread"
    silent = [
        path
        for path in option_paths(RunConfig)
        if is_read(path) and path not in reads and not any(f"{path}.".startswith(f"{known}.") for known in LAUNCHED)
    ]
    assert not silent, "said to be read, and nothing reads it"


EVALUATED = ("--eval.every_steps", "1")
SUPERVISED = [
    (SFT, sft, ("--sft.steps", "1", "--sft.rows_per_step", "2")),
    (DISTILL, distill, ("--sft.steps", "1", "--sft.rows_per_step", "2", "--algorithm.distillation.objective", "exact")),
    (DPO, pairs(PairTraining.DPO), ("--preferences.steps", "1", "--preferences.pairs_per_step", "2")),
    (KTO, pairs(PairTraining.KTO), ("--preferences.steps", "1", "--preferences.pairs_per_step", "2")),
    (REWARD_MODEL, pairs(PairTraining.REWARD_MODEL), ("--preferences.steps", "1", "--preferences.pairs_per_step", "2")),
    (
        PROCESS_REWARD,
        pairs(PairTraining.PROCESS_REWARD),
        ("--preferences.steps", "1", "--preferences.pairs_per_step", "2", "--preferences.step_separator", ";"),
    ),
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Rows for every command."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    lines = [
        f'{{"question": "{at}+1=", "answer": "{at + 1}", "chosen": "{at + 1}", "rejected": "x{at}", "label": {at % 2}, '
        f'"completions": ["{at + 1}"], "labels": [{at % 2}]}}'
        for at in range(24)
    ]
    path.write_text("\n".join(lines))
    return str(path)


@pytest.mark.parametrize(("reader", "run", "flags"), SUPERVISED, ids=[reader.command for reader, _, _ in SUPERVISED])
def test_supervised_commands_read_what_they_are_said_to_read(
    reader: Reader,
    run: Callable[[RunConfig, Registry, Path], None],
    flags: tuple[str, ...],
    model: str,
    rows: str,
    registry: Registry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    teachers = ("--teachers", model) if reader is DISTILL else ()
    config = config_of(model, registry, 1, "--data", rows, *EVALUATED, *flags, *teachers)
    with recorded(monkeypatch) as reads:
        run(config, registry, tmp_path / "run")
    check(reads, config, reader, WITHOUT_EFFECT)


def evaluation(config: RunConfig, registry: Registry, folder: Path) -> None:
    inference.evaluate_model(config, registry, Recorder())


def generation(config: RunConfig, registry: Registry, folder: Path) -> None:
    inference.sample_prompts(config, registry, [], num_prompts=2, num_samples=1)


def kept_generation(config: RunConfig, registry: Registry, folder: Path) -> None:
    rule = KeepRule.parse("best")
    keep.keep_samples(config, registry, rule, num_prompts=2, num_samples=2, notice=lambda text: None)


@pytest.mark.parametrize(
    ("reader", "run"),
    [(EVAL_FIGURES, evaluation), (GENERATE, generation), (GENERATE_KEPT, kept_generation)],
    ids=["eval", "generate", "generate --keep"],
)
def test_commands_that_only_sample_read_what_they_are_said_to_read(
    reader: Reader,
    run: Callable[[RunConfig, Registry, Path], None],
    model: str,
    rows: str,
    registry: Registry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @contextmanager
    def open_rollout(config: RunConfig, registry: Registry, **_: Any) -> Iterator[RoleGroup]:
        pools = placement_of(config.placement, [ROLLOUT], "cpu")
        (role,) = placed([rollout_role(with_dtype(config, "cpu")).loading_weights()], pools)
        yield start_in_process(role, registry)

    for module in (inference, keep):
        monkeypatch.setattr(module, "open_rollout", open_rollout)  # without a cluster around it
    config = config_of(model, registry, 1, "--data", rows)
    with recorded(monkeypatch) as reads:
        run(config, registry, tmp_path / "run")
    check(reads, config, reader, SAMPLED)


RECIPES: Mapping[str, tuple[str, ...]] = {
    "grpo": (),
    "ppo": ("--algorithm", "ppo", "--algorithm.kl_coef", "0.1", "--critic.optim.schedule", "linear"),
    "kl in the reward": (
        "--algorithm.kl_coef", "0.1", "--algorithm.kl_in_reward", "true", "--algorithm.kl_target", "0.1",
        "--algorithm.old_log_probs", "decoupled", "--algorithm.lengths.penalty", "0.1",
        "--algorithm.lengths.soft_tokens", "2", "--train.optim.schedule", "linear",
    ),
    "replaced groups": (
        "--algorithm.dynamic_sampling.enabled", "true", "--algorithm.correction.reject", "token",
        "--algorithm.correction.mode", "mask", "--tracking.samples_per_step", "0", "--eval.samples_per_prompt", "0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
def test_reinforcement_learning_reads_what_its_algorithm_uses(
    recipe: str, model: str, rows: str, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(model, registry, 1, "--data", rows, *EVALUATED, *RECIPES[recipe])
    with recorded(monkeypatch) as reads:
        train(config, registry, tmp_path / "run")
    check(reads, config, TRAIN, {})
