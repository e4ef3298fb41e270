"""`rlsdk migrate`: every setting of a script has a row, and the written file is a configuration of ours."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlsdk.agents.environments.tools import tool_names
from rlsdk.cli import main
from rlsdk.config import RunConfig, load_config
from rlsdk.interfaces import ConfigError
from rlsdk.migrate.draft import SECRETS, Draft, Fate, Script, Setting
from rlsdk.migrate.read import DRAFTS, migrate, script_of
from rlsdk.migrate.reward_source import reward_module
from rlsdk.migrate.writing import run_file, summary, table
from rlsdk.registry import Registry

INPUTS = Path(__file__).parent / "inputs"
FILES = sorted(path for path in INPUTS.iterdir() if path.is_file())
HERE = ["--rollout.backend", "transformers", "--rollout.tp_size", "1"]
"""A rollout engine that is always here, in place of one that may not be installed."""


def script(name: str) -> Script:
    return script_of((INPUTS / name).read_text(encoding="utf-8"), name)


def draft(name: str) -> Draft:
    found = script(name)
    return DRAFTS[found.peer](found)


EXPECTED: dict[str, tuple[str, dict[str, Any]]] = {
    "trl_grpo.py": (
        "train",
        {
            "trainer.prompts_per_step": 4,  # 8 rows x 4 passes / 8 samples
            "trainer.samples_per_prompt": 8,
            "trainer.updates_per_step": 2,
            "trainer.epochs_per_step": 2,
            "trainer.steps": 25,  # 100 optimizer steps, 4 a step
            "trainer.save_every_steps": 10,
            "train.optim.lr": 5e-6,
            "train.optim.warmup_ratio": 0.1,
            "train.optim.betas": [0.9, 0.99],
            "algorithm.advantage": "dr_grpo",
            "algorithm.loss_aggregation": "sequence_sum",
            "algorithm.loss_options": {"clip_low": 0.2, "clip_high": 0.28},
            "algorithm.kl_coef": 0.04,
            "rollout.max_response_tokens": 128,
            "data.max_prompt_tokens": 256,
            "data.prompt_field": "question",
            "data.train": "rows.jsonl",
            "rewards": [{"name": "run_rewards.py:is_right"}, {"name": "run_rewards.py:is_short", "weight": 0.2}],
        },
    ),
    "trl_sft.sh": (
        "sft",
        {
            "sft.rows_per_step": 64,  # 4 rows x 8 devices x 2
            "sft.lr": 2e-5,
            "sft.steps": 200,
            "sft.warmup_steps": 10,
            "sft.schedule": "linear",
            "rollout.max_response_tokens": 512,
            "eval.every_steps": 50,
            "placement.devices_per_node": 8,
        },
    ),
    "dpo.yaml": (
        "dpo",
        {
            "preferences.pairs_per_step": 16,
            "preferences.beta": 0.05,
            "preferences.loss": "ipo",
            "preferences.warmup_ratio": 0.1,
            "preferences.save_every_steps": None,
        },
    ),
    "kto.py": (
        "kto",
        {
            "preferences.pairs_per_step": 32,
            "preferences.beta": 0.2,
            "preferences.desirable_weight": 1.33,
            "preferences.undesirable_weight": 0.9,
            "preferences.steps": 30,
            "train.micro_batch_rows": 4,
        },
    ),
    "prm.py": (
        "process-reward",
        {
            "preferences.pairs_per_step": 16,
            "preferences.lr": 2e-5,
            "preferences.step_separator": "\n\n",
            "preferences.steps": 30,
            "train.micro_batch_rows": 4,
        },
    ),
    "cpo.yaml": (
        "dpo",
        {
            "preferences.loss": "simpo",
            "preferences.beta": 2.0,
            "preferences.target_margin": 1.0,
            "preferences.sft_coef": 0.0,
            "preferences.label_smoothing": 0.05,
        },
    ),
    "orpo.yaml": ("dpo", {"preferences.loss": "orpo", "preferences.beta": 0.3, "preferences.pairs_per_step": 2}),
    "verl_grpo.sh": (
        "train",
        {
            "trainer.prompts_per_step": 64,
            "trainer.samples_per_prompt": 8,
            "trainer.updates_per_step": 4,  # 64 prompts / 16
            "trainer.steps": 100,
            "train.optim.lr": 1e-6,
            "train.optim.warmup_steps": 40,
            "algorithm.advantage": "grpo",
            "algorithm.loss_aggregation": "sequence_mean",
            "algorithm.loss_options": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0},
            "algorithm.kl_coef": 0.001,
            "algorithm.kl_estimator": "low_var_kl",
            "rollout.max_response_tokens": 2048,
            "eval.samples_per_prompt": 4,
            "eval.temperature": 0.6,
            "eval.top_p": 0.7,
            "eval.top_k": 50,
            "eval.every_steps": 5,
            "eval.at_start": False,
            "trainer.save_every_steps": None,
            "rewards": [{"name": "rewards.py:score"}],
        },
    ),
    "verl_ppo.yaml": (
        "train",
        {
            "algorithm.advantage": "gae",
            "algorithm.advantage_options": {"gamma": 1.0, "lam": 0.95},
            "algorithm.kl_in_reward": True,
            "algorithm.kl_reward_estimator": "k1",
            "algorithm.kl_coef": 0.01,
            "algorithm.value_clip": 0.2,
            "critic.optim.lr": 2e-5,
            "train.micro_batch_tokens": 8192,
            "trainer.updates_per_step": 2,
            "trainer.epochs": 2.0,
            "reward_models": [{"path": "reward"}],
            "data.mixture": [{"source": "math/a.parquet"}, {"source": "math/b.parquet"}],
        },
    ),
    "openrlhf_grpo.sh": (
        "train",
        {
            "trainer.prompts_per_step": 128,
            "trainer.samples_per_prompt": 8,
            "trainer.updates_per_step": 4,  # 128 x 8 samples / 256
            "trainer.epochs": 2.0,
            "train.micro_batch_rows": 2,
            "train.optim.lr": 5e-7,
            "train.optim.schedule": "cosine",
            "train.optim.warmup_ratio": 0.03,
            "train.optim.min_lr_ratio": 0.1,
            "algorithm.advantage": "grpo",
            "algorithm.kl_estimator": "k3",
            "algorithm.loss_options": {"clip_low": 0.2, "clip_high": 0.27},
            "data.max_prompt_tokens": 1024,
            "rollout.max_response_tokens": 1024,
            "reward_models": [{"path": "reward"}],
        },
    ),
    "openrlhf_dpo.sh": (
        "dpo",
        {
            "preferences.pairs_per_step": 256,
            "preferences.lr": 5e-7,
            "preferences.chosen_field": "better",
            "preferences.epochs": 1.0,
            "train.micro_batch_rows": 2,
            "train.activation_checkpointing": True,
        },
    ),
    "gkd.py": (
        "train",
        {
            "algorithm.recipe": "on_policy_distillation",
            "algorithm.distillation.objective": "exact",
            "algorithm.distillation.divergence": "jsd",
            "algorithm.distillation.beta": 0.25,
            "teachers": [{"path": "teacher"}],
            "trainer.prompts_per_step": 32,  # 4 rows x 8
            "trainer.samples_per_prompt": 1,
            "trainer.updates_per_step": 1,
            "trainer.steps": 30,
            "train.optim.lr": 2e-5,
            "rollout.temperature": 0.8,
            "rollout.max_response_tokens": 256,
        },
    ),
    "gkd_given.sh": (
        "distill",
        {
            "algorithm.distillation.divergence": "forward",
            "teachers": [{"path": "teacher"}],
            "sft.rows_per_step": 8,
            "sft.lr": 2e-5,
            "sft.steps": 40,
            "sft.warmup_ratio": 0.1,
            "train.micro_batch_rows": 4,
            "data.max_prompt_tokens": 256,
        },
    ),
    "reward.py": ("reward-model", {"preferences.center_coef": 0.01, "preferences.pairs_per_step": 4}),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_numbers_are_those_of_the_script(name: str) -> None:
    found = draft(name)
    command, fields = EXPECTED[name]
    assert found.script.command == command
    assert {path: found.fields.get(path) for path in fields} == fields


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_setting_changes_the_file_or_its_row(file: Path) -> None:
    found = script(file.name)
    make = DRAFTS[found.peer]
    before = make(found)
    text, rows = run_file(before), table(before)
    named = {row.name for row in before.rows if not row.is_default}
    assert found.settings.keys() <= named
    for name, setting in found.settings.items():
        if name in SECRETS:
            continue
        changed = replace(found, settings={**found.settings, name: replace(setting, value=_other(setting.value))})
        after = make(changed)
        assert (run_file(after), table(after)) != (text, rows), name
        without = make(replace(found, settings={key: one for key, one in found.settings.items() if key != name}))
        assert (run_file(without), table(without)) != (text, rows), name


def _other(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int() | float():
            return value * 2 if value else 1
        case str():
            return f"{value}x"
        case list():
            return [*value, *value[-1:]]
    return "something else"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_file_is_a_configuration(file: Path) -> None:
    found = draft(file.name)
    values, here = yaml.safe_load(run_file(found)), HERE
    if values["train"].pop("deepspeed", None):
        here = [*HERE, "--train.backend", "fsdp"]  # may not be installed; see tests/migrate/test_launcher.py
    config = load_config(values=values, overrides=here, registry=Registry.discover())
    assert config.model.path == "model"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_what_is_not_in_the_file_stands_on_top_of_it(file: Path) -> None:
    found = draft(file.name)
    head = run_file(found).partition("\n\n")[0]
    missing = [row.name for row in found.rows if row.fate is Fate.REFUSED]
    assert all(name in head for name in missing)
    assert sum(summary(found).values()) >= len(found.script.settings)


def test_unknown_and_computed_settings_are_named() -> None:
    rows = {row.name: row for row in draft("trl_grpo.py").rows}
    assert rows["a_setting_of_tomorrow"].fate is Fate.REFUSED
    assert "does not know" in rows["a_setting_of_tomorrow"].why
    shell = script("trl_sft.sh")
    assert str(shell.settings["run_name"].value) == "sft-$USER_TAG"


def test_a_script_is_read_and_planned_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                              monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(300)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(SystemExit):
        main(["make-model", "model", "--context", "2048"])
    with pytest.raises(SystemExit) as left:
        main(["migrate", str(INPUTS / "trl_grpo.py"), "--plan"])
    out = capsys.readouterr().out
    assert left.value.code in (0, None), out
    assert "fits" in out
    assert "8 rows x 1 device x 4 passes / 8 samples = 4 prompts a step" in " ".join(out.split())
    module = Path("run_rewards.py").read_text()
    assert "def last_number" in module
    assert "NUMBER = " in module
    assert "trl" not in module.partition('"""\n')[2]
    with pytest.raises(SystemExit) as refused:
        main(["migrate", str(INPUTS / "trl_grpo.py")])
    assert refused.value.code == 2


ENVIRONMENT = """\
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

STEP = 1


def main():
    class Counter:
        def reset(self, **row):
            self.count = 0
            return "Count to three."

        def up(self, by: int) -> str:
            \'\'\'Counts.

            Args:
                by: how far.
            \'\'\'
            self.count += STEP * by
            return str(self.count)

        def get_reward(self) -> float:
            return float(self.count == 3)

    trainer = GRPOTrainer(
        model="m", reward_funcs=None, environment_factory=Counter,
        args=GRPOConfig(max_completion_length=100, max_tool_calling_iterations=4),
        train_dataset=load_dataset("json", data_files="rows.jsonl", split="train"),
    )
    trainer.train()
"""


def test_an_environment_of_trl_becomes_one_of_the_run(tmp_path: Path) -> None:
    source = str(tmp_path / "agent.py")
    read = script_of(ENVIRONMENT, source)
    found = DRAFTS[read.peer](read)
    assert found.fields["rollout.environment"] == "run_rewards.py:Counter"
    assert found.fields["rollout.max_turns"] == 5
    assert found.fields["rollout.max_model_tokens"] == RunConfig().data.max_prompt_tokens + 100
    file = tmp_path / "run_rewards.py"
    file.write_text(reward_module(ENVIRONMENT, found.functions, source))
    assert "trl" not in file.read_text().partition('"""\n')[2]
    made = runpy.run_path(str(file))["Counter"]
    assert tool_names(made) == ["up"]
    played = made()
    assert (played.reset(prompt="x"), played.up(by=3), played.get_reward()) == ("Count to three.", "3", 1.0)


@pytest.mark.parametrize(
    ("text", "source", "expected"),
    [
        ("from trl import BCOTrainer\nBCOTrainer(model='m')\n", "a.py", "uses BCOTrainer"),
        ("print(", "a.py", "is no Python"),
        ("echo hello\n", "run.sh", "no command starts a training"),
        ("- 1\n", "a.yaml", "expected a mapping"),
        ("colour: red\n", "a.yaml", "does not tell which trainer"),
    ],
)
def test_what_is_no_script_of_theirs_is_refused(text: str, source: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        script_of(text, source)


def test_nothing_is_run(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    text = "from trl import SFTConfig\nopen('made', 'w')\nSFTConfig(learning_rate=open('made', 'w'), max_steps=2)\n"
    file.write_text(text)
    found = migrate(file)
    assert not Path("made").exists()
    assert next(row for row in found.rows if row.name == "learning_rate").fate is Fate.REFUSED
    assert found.fields["sft.steps"] == 2


def test_devices_of_the_command_line_count() -> None:
    found = script("dpo.yaml")
    given = Setting(name="devices", value=4, where="--devices")
    made = DRAFTS[found.peer](replace(found, settings={**found.settings, "devices": given}))
    assert made.fields["preferences.pairs_per_step"] == 64
