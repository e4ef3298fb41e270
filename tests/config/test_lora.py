"""The section `model.lora`: what it makes of the roles, and what is refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from rlsdk.config import RunConfig, check_run, load_config, needed_roles, role_of, roles
from rlsdk.config.checks.training import Training, table_of
from rlsdk.config.derived.step_passes import step_passes
from rlsdk.interfaces import AdapterSpec, ConfigError
from rlsdk.registry import Registry

TASK = ["--model", "policy", "--data", "reasoning_gym:chain_sum", "--reward", "gsm8k", "--model.lora.rank", "8"]
KL = ["--algorithm.kl_coef", "0.1"]


def config_of(registry: Registry, *flags: str) -> RunConfig:
    return load_config([], [*TASK, *flags], registry)


def test_only_the_actor_has_the_adapter(registry: Registry) -> None:
    flags = ["--model.lora.targets", "[q_proj, v_proj]", "--model.lora.scaling", "rslora", "--algorithm.advantage",
             "gae", "--ref.path", "other", *KL]  # fmt: skip
    table = roles(config_of(registry, *flags))
    expected = AdapterSpec(rank=8, targets=("q_proj", "v_proj"), scaling="rslora")
    assert role_of(table, "actor").model.adapter == expected
    assert expected.scale == pytest.approx(32 / 8**0.5)
    assert [role.name for role in table if role.model.adapter is not None] == ["actor"]
    assert {role.name for role in table} == {"actor", "rollout", "ref", "critic"}


def test_the_actor_is_its_own_reference(registry: Registry) -> None:
    config = config_of(registry, *KL)
    assert "ref" in needed_roles(config)
    assert [role.name for role in roles(config)] == ["actor", "rollout"]
    assert "ref_log_probs" in [one.field for one in step_passes(config, stale=False).passes]
    assert [role.name for role in table_of(Training.DPO, config)] == ["actor"]
    assert [role.name for role in table_of(Training.DPO, config_of(registry, "--ref.path", "r"))] == ["actor", "ref"]


def test_without_a_rank_nothing_changes(registry: Registry) -> None:
    config = load_config([], [*TASK[:-2], *KL], registry)
    assert all(role.model.adapter is None for role in roles(config))
    assert [role.name for role in roles(config)] == ["actor", "rollout", "ref"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model.lora.dropout", "0.1"], "model.lora.dropout"),
        (["--model.lora.targets", "[]"], "model.lora.targets"),
        (["--model.lora.rank", "-1"], "model.lora.rank"),
        (["--model.lora.rank", "0", "--model.lora.path", "a"], "give its rank"),
        (["--model.init_from_config", "true"], "stay frozen"),
        (["--train.ema_decay", "0.9"], "train.ema_decay"),
        (["--model.lora.scaling", "rs"], "rslora"),
    ],
)
def test_values_that_do_not_fit_are_refused(flags: list[str], said: str, registry: Registry) -> None:
    with pytest.raises(ConfigError, match=said):
        config_of(registry, *flags)


def test_a_new_head_is_no_part_of_an_adapter(registry: Registry) -> None:
    config = config_of(registry)
    table = table_of(Training.REWARD_MODEL, config)
    problems = check_run(config, registry, device="cpu", train_only=True, table=table)
    assert "score head" in next(problem.text for problem in problems if problem.path == "model.lora.rank")


def test_an_engine_without_adapters_is_refused_with_those_that_have_them(registry: Registry) -> None:
    problems: list[Any] = check_run(config_of(registry, "--train.backend", "turbo"), registry, device="cpu")
    (found,) = [problem for problem in problems if problem.path == "model.lora.rank"]
    assert "'turbo' does not support 'lora'" in found.text
    assert "'torch'" in found.text
    assert not [p for p in check_run(config_of(registry), registry, device="cpu") if p.path.startswith("model.lora")]
