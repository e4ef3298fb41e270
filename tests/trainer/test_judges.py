"""A judge that is an engine of the run: a small model on the transformers backend, against its own greedy replies."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from rlsdk.cli.preparation.small_model import make
from rlsdk.config import RunConfig, check_run, dump_config, load_config, needed_roles, roles
from rlsdk.interfaces import ConfigError, RewardSample
from rlsdk.registry import Registry
from rlsdk.rewards import RewardResult
from rlsdk.testing.roles.in_process import InProcessStore, start_in_process
from rlsdk.trainer.generation.replicas import replicas_of
from rlsdk.trainer.inputs.judges import EngineJudge
from rlsdk.trainer.inputs.rewards import load_judges, start_remote
from rlsdk.trainer.roles.device_turns import DeviceTurns
from rlsdk.trainer.roles.memory_moves import CACHE, WEIGHTS, RoleMemory, moves
from rlsdk.trainer.roles.placement import roles as placed_roles
from rlsdk.trainer.roles.session import Session, sharding_manager, start_roles
from rlsdk.trainer.runs.build_rl import rl_stage
from rlsdk.trainer.runs.run_inputs import build_run_inputs
from rlsdk.trainer.stages.loop import Trainer
from rlsdk.trainer.tracking.events import RunView

TEMPLATE = "Rate {response} for {question}:"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judge") / "m"
    make(folder, architecture="qwen2", hidden=64, layers=1, context=512)
    return folder


def configured(model: Path, registry: Registry, **judge: Any) -> RunConfig:
    asked = {"engine": {"path": str(model), "max_model_tokens": 64}, "template": TEMPLATE, "max_tokens": 6, **judge}
    flags = ["--model", str(model), "--data", "quickstart:spell_backward"]
    rewards = [{"name": "judge", "label": "kind", "judge": asked}, {"name": "exact", "weight": 0.0}]
    return load_config([], [*flags, "--rewards", json.dumps(rewards), "--model.dtype", "float32"], registry)


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry.discover()


def made(response: str, **row: Any) -> RewardSample:
    return RewardSample(prompt="p", response=response, answer=None, row={"question": "q", **row}, truncated=False)


def greedy(model: Path, text: str) -> str:
    """What the judge says, by the library alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    said = net.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
    text = tokenizer.decode(said, skip_special_tokens=False)
    return str(text.removesuffix("<eos>"))


@pytest.fixture
def judging(model: Path, registry: Registry) -> Iterator[Any]:
    """Scores samples with the judge of a configuration, its engine in this process."""
    opened: list[Any] = []

    def score(samples: list[RewardSample], **judge: Any) -> RewardResult:
        config = configured(model, registry, **judge)
        (role,) = roles(config, needed=["judge.kind"])
        judges = load_judges(config)
        scorer = start_remote(config.rewards[0], config.reward_limits, judges)
        opened.append(scorer)
        waiting = scorer.submit(samples)  # The engine is there later than the rewards.
        group = start_in_process(role, registry, ranks=2)
        replicas = replicas_of(group.group, backend=role.backend, max_running=4)
        judges["judge.kind"].connect(replicas, progress_s=60.0)
        return waiting.result(90)

    yield score
    for scorer in opened:
        scorer.close()


def test_the_verdict_is_that_of_the_models_own_greedy_reply(judging: Any, model: Path) -> None:
    responses = ["abc", "x", "something else", "<eos>", "zz"]
    replies = [greedy(model, TEMPLATE.format(response=text, question="q")) for text in ("abc", "x", "something else")]
    choices = {reply: (at + 1) / 10 for at, reply in enumerate(dict.fromkeys(reply.casefold() for reply in replies))}
    result = judging(
        [*map(made, responses), made("y" * 100)], pattern=r"(?s)\A(.+)\Z", choices=choices
    )  # fmt: skip
    assert result.by_reward["kind"][:3].tolist() == pytest.approx([choices[reply.casefold()] for reply in replies])
    assert result.failed["kind"][5]
    messages = {one.sample: one.message for one in result.examples}
    assert "judge.kind: the question has more than 58 tokens, for which there is room" in messages.values()


def test_what_the_template_lacks_costs_its_sample(judging: Any) -> None:
    result = judging([made("a")], template="{response} {missing}", choices={"x": 1.0})
    assert "judge.kind: the judge's template asks for {missing}" in result.examples[0].message


def test_the_table_has_the_judge_as_an_engine_with_weights_of_its_own(model: Path, registry: Registry) -> None:
    config = configured(model, registry)
    assert needed_roles(config) == ("actor", "rollout", "judge.kind")
    role = {role.name: role for role in roles(config)}["judge.kind"]
    assert (role.is_rollout, role.has_own_weights, role.is_trained) == (True, True, False)
    assert (role.backend, role.spec.model.path) == ("transformers", str(model))
    assert check_run(config, registry, device="cpu") == []


def test_a_judge_that_takes_turns_keeps_its_weights_on_the_host() -> None:
    memories = [
        RoleMemory(role="rollout", is_rollout=True),
        RoleMemory(role="judge", is_rollout=True, keeps_weights=True),
    ]
    whole = frozenset((WEIGHTS, CACHE))
    found = moves(memories, {"rollout": whole, "judge": whole}, {})
    assert [(move.role, move.method, move.argument) for move in found] == [
        ("rollout", "sleep", 2),
        ("judge", "sleep", 1),
    ]


def test_a_judge_without_room_for_a_question_is_refused(model: Path, registry: Registry) -> None:
    config = configured(model, registry, max_tokens=64)
    with pytest.raises(ConfigError, match=r"judge.max_tokens 64: expected less than .* 64, because the question"):
        load_judges(config)


def test_a_closed_judge_leaves_nobody_waiting(model: Path, registry: Registry) -> None:
    config = configured(model, registry)
    judges: dict[str, EngineJudge] = load_judges(config)
    scorer = start_remote(config.rewards[0], config.reward_limits, judges)
    waiting = scorer.submit([made("a")])
    scorer.close()
    assert waiting.cancelled()


class Steps(RunView):
    """Keeps the metrics of steps, and what was noticed."""

    def __init__(self) -> None:
        self.steps: list[Mapping[str, float]] = []
        self.notices: list[str] = []

    def step(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        self.steps.append(metrics)

    def notice(self, text: str) -> None:
        self.notices.append(text)


def test_a_run_is_rewarded_by_a_judge(model: Path, registry: Registry, tmp_path: Path) -> None:
    """Two steps of GRPO on real engines, the judge among them; its verdicts differ, so the policy gets a gradient."""
    choices = {chr(at): at / 128 for at in range(33, 127)}
    engine = {"path": str(model), "max_model_tokens": 400}
    config = configured(
        model, registry, engine=engine, pattern=r"(?s)([\x21-\x7e])", choices=choices, max_tokens=16
    )  # fmt: skip
    flags = {"steps": 2, "prompts_per_step": 4, "samples_per_prompt": 4, "save_every_steps": None}
    config = config.model_copy(
        update={
            "trainer": config.trainer.model_copy(update=flags),
            "rollout": config.rollout.model_copy(update={"max_response_tokens": 8}),
            "data": config.data.model_copy(update={"num_eval_rows": 4, "num_train_rows": 32}),
            "eval": config.eval.model_copy(update={"every_steps": None}),
            "tracking": config.tracking.model_copy(update={"trackers": ()}),
            "reward_limits": config.reward_limits.model_copy(update={"on_failure": 0.0, "max_failure_share": 1.0}),
        }
    )
    view, turns = Steps(), DeviceTurns()
    make_group = functools.partial(start_in_process, registry=registry, seed=0)
    groups = start_roles(placed_roles(config, "cpu"), make_group, turns)
    manager = sharding_manager(config.sharding, registry, groups["actor"], groups["rollout"], timeout_s=60.0)
    session = Session(roles=groups, turns=turns, cluster=InProcessStore(), manager=manager)
    with (
        closing(build_run_inputs(config, registry, tmp_path, view)) as run_inputs,
        closing(rl_stage(config, registry, run_inputs, session)) as stage,
    ):
        Trainer(
            stage, session, tokenizer=run_inputs.tokenizer, config_text=dump_config(config), keep_checkpoints=1,
            stop=lambda: False,
        ).fit()  # fmt: skip
    assert [metrics["reward/kind/applied_share"] for metrics in view.steps] == [1.0, 1.0]
    assert all(metrics["reward/kind/failed_share"] < 1 and metrics["reward/std"] > 0 for metrics in view.steps), (
        view.notices
    )
    assert all(metrics["policy/grad_norm"] > 0 for metrics in view.steps)
