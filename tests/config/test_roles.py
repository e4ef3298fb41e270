"""The table of roles: which a run needs, what each is built from, and which field is to blame when one cannot be."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from rlsdk.config import RunConfig, check_run, dump_config, load_config, needed_roles, role_of, roles, sft_optim_spec
from rlsdk.config.derived.pair_roles import preference_optim_spec
from rlsdk.interfaces import BackendKind, ConfigError, Head, TrainSpec
from rlsdk.interfaces.settings import OptimSettings, PassLimits, ReplicaSize, TrainPasses, shared
from rlsdk.kit.model.optim import learning_rate
from rlsdk.registry import Registry

TASK = ["--model", "policy", "--data", "reasoning_gym:chain_sum", "--reward", "gsm8k"]
PPO = ["--algorithm.advantage", "gae", "--algorithm.kl_coef", "0.1"]
MODELS = ["--reward_models", "[{path: h, name: helpful, weight: 2.0}, {path: s, name: safe, micro_batch_rows: 3}]"]


def config_of(registry: Registry, *flags: str) -> RunConfig:
    return load_config([], [*TASK, *flags], registry)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], ("actor", "rollout")),
        (PPO[:2], ("actor", "rollout", "critic")),
        (PPO[2:], ("actor", "rollout", "ref")),
        ([*PPO, *MODELS], ("actor", "rollout", "ref", "critic", "reward.helpful", "reward.safe")),
        (["--reward_models", "[{path: h}]"], ("actor", "rollout", "reward")),
    ],
)
def test_the_algorithm_says_which_roles_a_run_needs(
    flags: list[str], expected: tuple[str, ...], registry: Registry
) -> None:
    config = config_of(registry, *flags)
    assert needed_roles(config) == expected
    assert tuple(role.name for role in roles(config)) == expected
    assert needed_roles(config, train_only=True) == ("actor",)


def test_what_a_section_leaves_open_is_as_train_and_model_say(registry: Registry) -> None:
    table = roles(config_of(registry, *PPO, *MODELS, "--train.micro_batch_tokens", "99", "--model.dtype", "bfloat16"))
    for role in table:
        assert role.model.dtype == "bfloat16"
        if isinstance(role.spec, TrainSpec) and role.name != "reward.safe":
            assert (role.spec.micro_batch_tokens, role.spec.micro_batch_rows) == (99, None)
    assert [role.model.head for role in table] == [Head.LM, Head.LM, Head.LM, Head.VALUE, Head.SCORE, Head.SCORE]
    assert [role.model.path for role in table] == ["policy", "policy", "policy", "policy", "h", "s"]
    assert [role.is_trained for role in table] == [True, False, False, True, False, False]
    actor, critic, safe = (role_of(table, name) for name in ("actor", "critic", "reward.safe"))
    assert (actor.optim and actor.optim.lr, critic.optim and critic.optim.lr) == (1e-6, 1e-5)
    assert isinstance(safe.spec, TrainSpec)
    assert (safe.spec.micro_batch_tokens, safe.spec.micro_batch_rows) == (None, 3)


def test_every_role_may_have_a_backend_model_and_optimizer_of_its_own(registry: Registry) -> None:
    flags = [
        "--critic.backend", "turbo", "--critic.turbo.ratio", "0.25", "--critic.path", "c", "--critic.optim.eps", "1e-6",
        "--ref.dtype", "bfloat16", "--ref.path", "r", "--train.engine_kwargs", "{a: 1}",
    ]  # fmt: skip
    table = roles(config_of(registry, *PPO, *flags, "--model.init_from_config", "true"))
    actor, ref, critic = (role_of(table, name) for name in ("actor", "ref", "critic"))
    assert (actor.backend, ref.backend, critic.backend) == ("torch", "torch", "turbo")
    assert (actor.options, ref.options, critic.options) == ({}, {}, {"ratio": 0.25})
    # Arguments of another engine's constructor are not passed on.
    assert (ref.spec.engine_kwargs, critic.spec.engine_kwargs) == ({"a": 1}, {})
    assert (ref.model.path, ref.model.dtype, critic.model.path) == ("r", "bfloat16", "c")
    assert critic.optim is not None
    assert (critic.optim.lr, critic.optim.eps) == (1e-5, 1e-6)
    # Random weights are for the model that is configured; a folder that is named is read.
    inits = [role.spec.init_from_config for role in (actor, ref, critic) if isinstance(role.spec, TrainSpec)]
    assert inits == [True, False, False]
    warmed = role_of(roles(config_of(registry, *PPO, "--model.init_from_config", "true")), "ref").with_model("warm")
    assert isinstance(warmed.spec, TrainSpec)
    assert (warmed.model.path, warmed.spec.init_from_config) == ("warm", False)


def test_the_table_survives_being_written_and_read(registry: Registry, tmp_path: Path) -> None:
    config = config_of(registry, *PPO, *MODELS, "--critic.backend", "turbo", "--critic.turbo.ratio", "0.25")
    (tmp_path / "config.yaml").write_text(dump_config(config))
    again = load_config([tmp_path / "config.yaml"], [], registry)
    assert again == config
    assert roles(again) == roles(config)


def test_schedules_count_the_steps_that_a_role_makes(registry: Registry) -> None:
    flags = ["--trainer.steps", "10", "--trainer.updates_per_step", "2", "--critic.warmup_steps", "3"]
    table = roles(config_of(registry, *PPO, *flags))
    totals = {role.name: role.optim.total_steps for role in table if role.optim is not None}
    assert totals == {"actor": 14, "critic": 20}


@pytest.mark.parametrize(("steps", "warmup"), [(30, 3), (31, 4), (1, 1)])
def test_a_share_of_the_steps_is_whole_steps_of_warm_up(steps: int, warmup: int, registry: Registry) -> None:
    share, count = ("--train.optim.warmup_ratio", "0.1"), ("--trainer.steps", str(steps))
    actor = role_of(roles(config_of(registry, *share, *count, "--train.optim.schedule", "cosine")), "actor")
    assert actor.optim is not None
    assert (actor.optim.warmup_steps, actor.optim.total_steps) == (warmup, steps)
    twice = config_of(registry, *share, *count, "--trainer.updates_per_step", "2")
    spec = role_of(roles(twice), "actor").optim
    assert spec is not None
    assert spec.warmup_steps == math.ceil(0.1 * 2 * steps)


def test_supervised_training_and_pairs_have_schedules_of_their_own(registry: Registry) -> None:
    own = ("--sft.steps", "40", "--sft.schedule", "cosine", "--sft.warmup_ratio", "0.25", "--sft.lr", "0.5")
    config = config_of(registry, *own, "--train.optim.min_lr_ratio", "0.2", "--train.optim.warmup_steps", "5")
    sft, pairs = sft_optim_spec(config), preference_optim_spec(config)
    assert (sft.warmup_steps, sft.schedule, sft.total_steps, sft.lr) == (10, "cosine", 40, 0.5)
    middle = 0.5 * (0.2 + 0.8 * (1 + math.cos(math.pi / 2)) / 2)
    assert [learning_rate(step, sft) for step in (0, 9, 25, 40)] == pytest.approx([0.05, 0.5, middle, 0.1])
    assert (pairs.warmup_steps, pairs.schedule) == (0, "constant")


def test_what_keeps_a_role_from_running_is_said_at_the_field_that_asks(registry: Registry) -> None:
    def found(*flags: str, **given: Any) -> list[str]:
        config = config_of(registry, "--model.dtype", "float32", *flags)
        problems = check_run(config, registry, "llama", "cuda", **given)
        return [str(problem) for problem in problems if problem.path != "algorithm.advantage"]

    assert found(*PPO, *MODELS) == []
    own = ["--critic.backend", "turbo", "--critic.dtype", "bfloat16"]
    assert found(*PPO, *own) == [
        "critic.backend: train backend 'turbo' does not support 'value_head'; installed and able: 'torch'"
    ]
    inherited = ["--train-backend", "turbo", "--model.dtype", "bfloat16"]
    assert found(*PPO, *inherited) == [
        "train.backend: train backend 'turbo' does not support 'value_head'; installed and able: 'torch'"
    ]
    models = "[{path: h, name: a, backend: turbo, options: {ratoi: 1.0}}]"
    scored = found("--reward_models", models, models={"reward.a": {"model_type": "qwen3"}})
    assert [line.partition(": train")[0] for line in scored[:3]] == [
        "model.dtype", "reward_models.0.path", "reward_models.0.backend",
    ]  # fmt: skip
    assert scored[3].startswith("reward_models.0.options.ratoi: unknown key; did you mean 'ratio'?")


def test_a_model_without_a_head_of_scores_is_no_reward_model(registry: Registry) -> None:
    config = config_of(registry, "--reward_models", "[{path: h}]")

    def found(*architectures: str) -> list[str]:
        fields = {"architectures": list(architectures)} if architectures else {}
        return [str(problem) for problem in check_run(config, registry, models={"reward": fields})]

    (said,) = found("Qwen3ForCausalLM")
    assert said.startswith("reward_models.0.path: 'h' is a Qwen3ForCausalLM, which gives no score: expected an archi")
    assert found("Qwen3ForSequenceClassification") == found() == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--reward_models", "[{path: a}, {path: b, name: x}]"], "reward_models.0.name: is required where there are 2"),
        (["--reward_models", "[{path: a, name: x}, {path: b, name: x}]"], "reward_models.0 has it"),
        (["--reward_models", "[{path: a, name: x.y}]"], "reward_models.0.name: 'x.y': expected letters"),
        ([*PPO, "--critic.warmup_steps", "200"], "critic.warmup_steps: 200: expected fewer than trainer.steps 200"),
        (["--placement.preset", "disaggregated", "--placement.devices", "{aktor: 2}"], "did you mean 'actor'"),
        (["--critic.backend", "turbbo"], "critic.backend: .*did you mean 'turbo'"),
        (["--critic.backend", "turbo", "--critic.turbo.ratoi", "1.0"], "critic.turbo.ratoi: .*'ratio'"),
        (["--ref.micro_batch_rows", "1", "--ref.micro_batch_tokens", "9"], "ref.micro_batch_tokens: .*at most one"),
    ],
)
def test_sections_of_roles_are_refused_by_field(flags: list[str], message: str, registry: Registry) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(registry, *flags)


def test_a_reward_model_is_reward_enough(registry: Registry) -> None:
    config = load_config([], ["--model", "m", "--data", "d", "--reward_models", "[{path: h}]"], registry)
    assert check_run(config, registry) == []
    assert {role.kind for role in roles(config)} == {BackendKind.TRAIN, BackendKind.ROLLOUT}


def test_a_specification_has_every_setting_of_its_section(registry: Registry) -> None:
    rollout = {"tp_size": 2, "pp_size": 3, "dp_size": 4, "ep_size": 8}
    optim = {
        "lr": 0.5, "betas": [0.1, 0.2], "eps": 0.3, "weight_decay": 0.4, "max_grad_norm": 2.0, "schedule": "linear",
        "warmup_steps": 3, "min_lr_ratio": 0.6,
    }  # fmt: skip
    given = {
        "rollout": rollout,
        "train.optim": optim,
        "train": {"micro_batch_rows": 5, "activation_checkpointing": True},
        "critic": {"micro_batch_tokens": 7},
    }
    flags = [text for path, values in given.items() for name, value in values.items()
             for text in (f"--{path}.{name}", str(value).lower())]  # fmt: skip
    config = config_of(registry, *PPO, *flags)
    actor, sampler, critic = (role_of(roles(config), name).spec for name in ("actor", "rollout", "critic"))
    for settings, kind, specification in (
        (config.rollout, ReplicaSize, sampler),
        (config.train, TrainPasses, actor),
        (config.train.optim, OptimSettings, actor.optim),
        (config.critic, PassLimits, critic),
    ):
        assert shared(settings, kind) == shared(specification, kind)
    plain = (ReplicaSize(), OptimSettings(), TrainPasses())
    for spec, default in zip((sampler, actor.optim, actor), plain, strict=True):
        same = [name for name, value in shared(default, type(default)).items() if getattr(spec, name) == value]
        assert same == (["micro_batch_tokens"] if spec is actor else [])
