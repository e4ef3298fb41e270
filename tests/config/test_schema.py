"""The typed sections: closed, immutable, described, and checked between fields."""

from __future__ import annotations

import pickle
import subprocess
import sys
import typing
from dataclasses import fields
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from rlsdk.config import RunConfig
from rlsdk.config.introspection.describe import option_texts
from rlsdk.config.introspection.fields import members, section_of
from rlsdk.config.sections.base import Section
from rlsdk.interfaces.settings import OptimSettings, PassLimits, ReplicaSize, RewardLimits, TrainPasses


def sections(model: type[BaseModel]) -> list[type[BaseModel]]:
    inner = [
        section_of(argument) for field in model.model_fields.values() for argument in _with_items(field.annotation)
    ]
    return [model, *(found for section in inner if section for found in sections(section))]


def _with_items(annotation: Any) -> list[Any]:
    return [a for member in members(annotation) for a in (member, *typing.get_args(member))]


def test_every_field_of_every_section_is_described() -> None:
    found = sections(RunConfig)
    assert len(found) >= 16
    assert [f"{s.__name__}.{name}" for s in found for name in s.model_fields if not option_texts(s).get(name)] == []


def test_a_setting_that_a_section_inherits_has_its_range_and_its_meaning() -> None:
    """It is declared once, in `rlsdk.interfaces.settings`, and what is built from a section has the same value."""
    found = RunConfig.model_json_schema()["$defs"]
    pairs = (("OptimConfig", OptimSettings), ("TrainConfig", TrainPasses), ("RolloutConfig", ReplicaSize))
    for name, settings in (*pairs, ("CriticConfig", PassLimits), ("RewardLimitsConfig", RewardLimits)):
        for field in fields(settings):
            assert found[name]["properties"][field.name]["description"], (name, field.name)
    assert found["RewardLimitsConfig"]["properties"]["memory_mb"]["exclusiveMinimum"] == 0
    with pytest.raises(ValidationError, match="greater than 0"):
        RunConfig.model_validate({"rollout": {"tp_size": 0}})


def test_a_section_has_the_fields_of_its_base_as_they_are_there() -> None:
    """pydantic would take a default from a dataclass that the base inherits, and forget what the base made of it."""
    bases = [(section, base) for section in sections(RunConfig) for base in section.__mro__[1:] if base is not Section]
    for section, base in bases:
        if issubclass(base, Section):
            own = {name for kind in section.__mro__[: section.__mro__.index(base)] for name in kind.__annotations__}
            for name in base.model_fields.keys() - own:
                field, before = section.model_fields[name], base.model_fields[name]
                same = (before.default, before.metadata, before.annotation)
                assert (field.default, field.metadata, field.annotation) == same, (section, name)


def test_sections_are_immutable_and_closed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        RunConfig().trainer.steps = 5
    with pytest.raises(ValidationError, match="stepz"):
        RunConfig.model_validate({"trainer": {"stepz": 5}})


@pytest.mark.parametrize(
    "wrong",
    [
        {"trainer": {"steps": "5"}},
        {"trainer": {"steps": True}},
        {"trainer": {"steps": 1.0}},
        {"data": {"shuffle": 1}},
        {"train": {"optim": {"lr": float("nan")}}},
        {"train": {"optim": {"lr": float("inf")}}},
        {"model": {"path": 5}},
        {"placement": {"pools": {"a": {"devices_per_node": ["5"]}}}},
        {"rollout": {"stop_strings": [1]}},
    ],
)
def test_nothing_is_taken_for_another_type(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        RunConfig.model_validate(wrong)


def test_a_whole_number_serves_as_a_number_and_a_list_as_a_tuple() -> None:
    config = RunConfig.model_validate({"train": {"optim": {"lr": 1, "betas": [0, 0.9]}}})
    assert (config.train.optim.lr, config.train.optim.betas) == (1.0, (0.0, 0.9))


def test_dynamic_sampling_goes_with_models_that_count_for_nothing() -> None:
    values = {"algorithm": {"dynamic_sampling": {"enabled": True}}, "reward_models": [{"path": "a", "weight": 0}]}
    assert RunConfig.model_validate(values).algorithm.dynamic_sampling.enabled


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"train": {"micro_batch_tokens": None}}, "exactly one of the two"),
        ({"train": {"micro_batch_tokens": 5, "micro_batch_rows": 5}}, "exactly one of the two"),
        ({"trainer": {"prompts_per_step": 2, "samples_per_prompt": 2, "updates_per_step": 5}}, "2 x 2|2 prompts x 2"),
        (
            {"trainer": {"save_every_steps": 20, "export_every_steps": 50}},
            r"export_every_steps.*50 is no multiple of save_every_steps, which is 20.* nearest that fits is 40",
        ),
        (
            {"trainer": {"save_every_steps": None, "export_every_steps": 50}},
            "export_every_steps.*no effect: save_every_steps is null",
        ),
        ({"trainer": {"samples_per_prompt": 1}}, "at least 2, because algorithm.advantage 'grpo'"),
        ({"trainer": {"samples_per_prompt": 1}, "algorithm": {"advantage": "rloo"}}, "advantage 'rloo'"),
        ({"trainer": {"samples_per_prompt": 1}, "algorithm": {"advantage": "dr_grpo"}}, "advantage 'dr_grpo'"),
        ({"algorithm": {"kl_in_reward": True}}, "kl_coef above 0"),
        (
            {"algorithm": {"dynamic_sampling": {"enabled": True}}, "reward_models": [{"path": "models/judge"}]},
            r"algorithm.dynamic_sampling.enabled: true cannot be combined with reward_models.0 \(models/judge\)",
        ),
        (
            {
                "algorithm": {"dynamic_sampling": {"enabled": True}},
                "rewards": [{"name": "gsm8k"}],
                "reward_models": [{"path": "a", "name": "a", "weight": 0}, {"path": "b", "name": "b", "weight": 0.1}],
            },
            r"combined with reward_models.1 \(b\): a group is judged when it is graded",
        ),
        (
            {"algorithm": {"dynamic_sampling": {"enabled": True}, "kl_in_reward": True, "kl_coef": 0.1}},
            "dynamic_sampling.enabled: true cannot be combined with algorithm.kl_in_reward",
        ),
        (
            {
                "algorithm": {"dynamic_sampling": {"enabled": True}, "advantage": "reinforce_plus_plus"},
                "trainer": {"samples_per_prompt": 1},
            },
            "algorithm.dynamic_sampling.enabled: true needs trainer.samples_per_prompt of at least 2",
        ),
        ({"train": {"optim": {"schedule": "cosine", "warmup_steps": 200}}}, "fewer than the run's 200 optimizer steps"),
        (
            {"sft": {"steps": 9, "schedule": "linear", "warmup_steps": 9}},
            "warmup_steps: 9: expected fewer than sft.steps 9",
        ),
        ({"train": {"optim": {"warmup_ratio": 1.0}}}, "less than 1"),
        ({"eval": {"top_p": 0.5, "sets": {"a": {}}}}, "top_p: 0.5 has no effect beside eval.sets"),
        ({"train": {"optim": {"betas": [0.9, 1.0]}}}, "less than 1"),
        ({"rollout": {"max_model_tokens": 100}}, r"1024 \+ 1024 = 2048"),
        (
            {"rollout": {"rollouter": "own.py:play"}},
            r"(?s)rollout.max_model_tokens: null makes room for a prompt and one response \(2048 tokens\), but "
            r"rollout.rollouter is 'own.py:play': .* for instance `--rollout.max_model_tokens 5120`",
        ),
        ({"rollout": {"rollouter": "own.py:play", "max_model_tokens": 100}}, r"1024 \+ 1024 = 2048"),
        ({"rollout": {"stop_strings": [""]}}, "ends every response"),
        ({"data": {"system_prompt": "x", "chat_template": "never"}}, "needs a chat template"),
        ({"data": {"eval_options": {"a": 1}}}, "no effect"),
        ({"data": {"train": "a.jsonl", "num_eval_rows": None}}, "held-out rows must be a number"),
        ({"eval": {"greedy": False, "samples_per_prompt": 0}}, "nothing to measure"),
        ({"placement": {"preset": None}}, "at least one pool"),
        ({"placement": {"preset": "colocate_all", "roles": {"actor": "a"}}}, "expected null"),
        ({"placement": {"pools": {"a": {"devices_per_node": [1]}}}}, "no pool to role 'actor'"),
        ({"placement": {"pools": {"a": {"devices_per_node": [0]}}}}, "holds no device"),
        ({"placement": {"pools": {"a": {"devices_per_node": []}}}}, "holds no device"),
        (
            {"placement": {"pools": {"a": {"devices_per_node": [1]}}, "roles": {"actor": "a", "rollout": "b"}}},
            r"'b' is not one of the pools \['a'\]",
        ),
        ({"placement": {"devices": {"actor": 1}}}, "has no effect where placement.preset is 'colocate_all'"),
        ({"tracking": {"options": {"wandb": {}}}}, "not one of tracking.trackers"),
    ],
)
def test_an_impossible_combination_is_refused_and_explained(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RunConfig.model_validate(wrong)


def test_rows_replace_tokens_and_pools_replace_the_preset_when_only_they_are_given() -> None:
    placement = {"pools": {"a": {"devices_per_node": [2, 2]}}, "roles": {"actor": "a", "rollout": "a"}}
    config = RunConfig.model_validate({"train": {"micro_batch_rows": 4}, "placement": placement})
    assert (config.train.micro_batch_tokens, config.train.micro_batch_rows) == (None, 4)
    assert config.placement.preset is None


def test_sizes_that_follow_from_others() -> None:
    config = RunConfig.model_validate({"trainer": {"steps": 3, "updates_per_step": 2, "epochs_per_step": 2}})
    assert config.trainer.samples_per_step == 64 * 8
    assert config.trainer.optimizer_steps == 12
    assert config.max_model_tokens == 2048
    assert RunConfig.model_validate({"rollout": {"max_model_tokens": 4096}}).max_model_tokens == 4096


def test_filters_of_an_evaluation_are_those_of_its_sampled_responses() -> None:
    config = RunConfig.model_validate({"eval": {"top_p": 0.5, "top_k": 7, "temperature": 0.6}})
    sampled, greedy = config.eval.measures()
    assert (sampled.config.top_p, sampled.config.top_k, sampled.config.temperature) == (0.5, 7, 0.6)
    assert (greedy.config.top_p, greedy.config.top_k, greedy.config.temperature) == (1.0, 0, 0.0)


def test_a_configuration_survives_pickling() -> None:
    config = RunConfig.model_validate({"rewards": [{"name": "gsm8k", "options": {"a": [1, None]}}]})
    assert pickle.loads(pickle.dumps(config)) == config


def test_importing_the_configuration_loads_no_engine() -> None:
    code = "import sys, rlsdk.config; print([m for m in ('torch', 'ray', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
