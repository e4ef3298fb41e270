"""Names of other trainers are answered with ours, on the command line, in YAML and from Python."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

import rlsdk
from rlsdk.api.settings import from_keywords
from rlsdk.cli import main
from rlsdk.cli.commands import app
from rlsdk.config import RunConfig, load_config
from rlsdk.config.checks.commands import READERS
from rlsdk.config.loading.foreign_names import CLASSES, COMMANDS, FOREIGN_NAMES, NOT_FIELDS, answer
from rlsdk.config.loading.load import read_config
from rlsdk.config.loading.overrides import ALIASES
from rlsdk.interfaces import ConfigError
from rlsdk.registry import Registry

COMMON = (
    "use_vllm", "report_to", "gradient_accumulation_steps", "n", "peft_config", "zero_stage", "pretrain",
    "init_kl_coef", "wandb", "eval_steps", "num_generations", "dry_run", "adv_estimator", "train_dataset",
    "actor_rollout_ref.model.path", "actor_rollout_ref.rollout.n", "algorithm.adv_estimator", "learning_rate",
    "per_device_train_batch_size", "max_steps", "num_train_epochs", "warmup_ratio", "warmup_steps", "lr_scheduler_type",
    "max_prompt_length", "max_completion_length", "beta", "epsilon", "loss_type", "bf16", "gradient_checkpointing",
    "logging_steps", "save_steps", "eval_strategy", "output_dir", "push_to_hub", "model_name_or_path", "dataset_name",
    "reward_funcs", "max_grad_norm", "lora_r", "use_peft", "packing", "attn_implementation", "ppo_mini_batch_size",
    "kl_loss_coef", "use_kl_loss", "entropy_coeff", "loss_agg_mode", "clip_ratio", "tensor_model_parallel_size",
    "gpu_memory_utilization", "nnodes", "n_gpus_per_node", "total_epochs", "total_training_steps", "test_freq",
    "experiment_name", "prompt_data", "rollout_batch_size", "train_batch_size", "n_samples_per_prompt",
    "actor_learning_rate", "critic_learning_rate", "advantage_estimator", "remote_rm_url", "vllm_num_engines",
    "colocate_all_models", "flash_attn", "adam_offload",
)  # fmt: skip


def problems_of(name: str, registry: Registry) -> str:
    loaded = read_config((), [f"--{name}", "1"], registry, reader=READERS["train"])
    return " ".join(problem.text for problem in loaded.problems if problem.path.startswith(name.partition(".")[0]))


@pytest.mark.parametrize("name", COMMON)
def test_a_common_name_is_answered(name: str, registry: Registry) -> None:
    assert len(COMMON) >= 60
    text = problems_of(name, registry)
    assert "did you mean" in text or any(reason in text for reason in NOT_FIELDS.values()), text


@pytest.mark.parametrize("name", ["gradient_accumulation_steps", "peft_config", "adv_estimator", "train_dataset"])
def test_yaml_and_python_answer_too(name: str, registry: Registry, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"{name}: 1\n")
    expected = NOT_FIELDS.get(name) or FOREIGN_NAMES[name][0][0]
    with pytest.raises(ConfigError) as written:
        load_config([file], registry=registry)
    assert expected in str(written.value)
    with pytest.raises(ConfigError) as called:
        from_keywords({name: 1}, READERS["train"], config=None, trust_run=False)
    assert expected.rpartition(".")[2] in str(called.value)


def test_overrides_of_hydra_get_one_answer(registry: Registry) -> None:
    words = ["algorithm.adv_estimator=grpo", "data.train_batch_size=64", "+trainer.total_epochs=3"]
    with pytest.raises(ConfigError) as error:
        read_config((), words, registry)
    text = str(error.value)
    assert "\n" not in text
    assert "3 arguments" in text
    assert "rlsdk migrate" in text


def test_all_unknown_keys_are_named_and_the_sections_listed_once(registry: Registry) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(overrides=["--qqqq", "1", "--zzzzzz", "2"], registry=registry)
    assert str(error.value).count("expected one of") == 1
    with pytest.raises(ConfigError) as called:
        from_keywords({"qqqq": 1, "zzzzzz": 2, "use_peft": True}, READERS["train"], config=None, trust_run=False)
    text = str(called.value)
    assert all(name in text for name in ("qqqq", "zzzzzz", "use_peft"))
    assert text.count("the sections are") == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_of_others_are_answered(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([name])
    assert left.value.code == 2
    assert "Here:" in " ".join(capsys.readouterr().err.split())


def test_every_command_that_is_typed_as_an_option_is_answered(registry: Registry) -> None:
    commands = set(typer.main.get_command(app).commands) - {"config"}  # type: ignore[attr-defined]  # --config is a file
    fields = {*RunConfig.model_fields, *ALIASES}
    typed = [*(commands - fields), "verbose", "export", "dry-run"]
    assert len(typed) > 20
    for name in typed:
        for word in (f"--{name}", f"--{name.replace('-', '_')}"):
            loaded = read_config((), [word], registry, reader=READERS["train"])
            assert [problem.hint for problem in loaded.problems] == [answer(name)], name
            assert answer(name), name


def test_the_word_of_a_command_inside_a_section_is_no_command(registry: Registry) -> None:
    assert "did you mean model.lora.init?" in problems_of("model.init", registry)


@pytest.mark.parametrize("name", CLASSES)
def test_classes_of_trl_are_answered(name: str) -> None:
    with pytest.raises(AttributeError, match=r"here: `rlsdk\."):
        getattr(rlsdk, name)


@pytest.mark.parametrize(("name", "ours"), [("run-name", "trainer.run_name"), ("num-train-epochs", "trainer.epochs")])
def test_a_hyphen_is_read_as_an_underscore_when_a_name_is_looked_for(name: str, ours: str, registry: Registry) -> None:
    assert f"did you mean {ours}?" in problems_of(name, registry)
