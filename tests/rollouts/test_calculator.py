"""Turns and a tool, on real engines: the example's rollouter, from the file that a person would name."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from rlsdk.algorithms import loss_weights
from rlsdk.config import Role, RunConfig, check_run, load_config
from rlsdk.interfaces import Batch, Ended, FinishReason, GenerationRequest
from rlsdk.kit.model.hf import load_tokenizer
from rlsdk.registry import ComponentKind, Registry
from rlsdk.rollouts import Group, Sample, make_batch
from rlsdk.rollouts.groups.receipts import token_account
from rlsdk.testing.roles.in_process import InProcessStore, start_in_process
from rlsdk.trainer.learner.metrics import StepClock
from rlsdk.trainer.roles.device_turns import DeviceTurns, shared_pools
from rlsdk.trainer.roles.placement import placement_of, roles
from rlsdk.trainer.roles.session import Session, sharding_manager, start_roles
from rlsdk.trainer.runs.build_rl import rl_stage
from rlsdk.trainer.runs.run_inputs import build_run_inputs
from rlsdk.trainer.stages.rl import RlStage, rollout_info
from rlsdk.trainer.tracking.events import RunView

EXAMPLE = Path(__file__).parents[2] / "examples" / "calculator"
KNOWN = {
    "141 - 365": ("c(141 - 365)=-224;#-224", "-224"),
    "100 + 200 + 300": ("c(100 + 200)=300;c(300 + 300)=600;#600", "600"),
    "5 +": ("c(5 +)=?;#0", "5"),
    "7 + 8": ("#15", "15"),
    "1 + 1": ("c(1 + 1)=2;" * 4 + "#2", "2"),
}
"""Problem -> what the model says and hears, and the right answer. One call is no operation, one has too many."""


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"calculator_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry.discover({"RLSDK_PLUGINS": "rlsdk"})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's model, which has learned `KNOWN` by heart."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("calculator") / "model"
    example("prepare").write_model(folder)
    tokenizer = load_tokenizer(str(folder))
    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    rows = tokenizer([f"{asked}>{said}<eos>" for asked, (said, _) in KNOWN.items()], padding=True, return_tensors="pt")
    labels = rows["input_ids"].masked_fill(rows["attention_mask"] == 0, -100)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3)
    for _ in range(80):
        loss = policy(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"], labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    policy.save_pretrained(folder)
    return folder


def config_of(
    model: Path, registry: Registry, folder: Path, *extra: str, reward: str = f"{EXAMPLE / 'calculator.py'}:right"
) -> RunConfig:
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, (_, a) in KNOWN.items()))
    flags = [
        "--config", str(EXAMPLE / "run.yaml"), "--model", str(model), "--model.init_from_config", "false",
        "--data", str(data), "--data.shuffle", "false", "--eval.every_steps", "null", "--tracking.trackers", "[]",
        "--reward", reward, "--rollout.rollouter", f"{EXAMPLE / 'calculator.py'}:calculate",
        "--rollout.temperature", "0.2", "--trainer.prompts_per_step", str(len(KNOWN)),
        "--trainer.samples_per_prompt", "2", "--trainer.updates_per_step", "1", "--trainer.steps", "1",
        "--train.optim.warmup_steps", "0", "--sft.steps", "0", "--placement.cpus_per_device", "1",
    ]  # fmt: skip
    return load_config([], [*flags, *extra], registry)


@contextmanager
def stage_of(config: RunConfig, registry: Registry, folder: Path) -> Iterator[RlStage]:
    table = roles(config, "cpu")
    placement = placement_of(config.placement, [role.name for role in table], "cpu")
    turns = DeviceTurns(shared=shared_pools(placement))

    def build(role: Role) -> Any:
        return start_in_process(role, registry)

    groups = start_roles(table, build, turns)
    manager = sharding_manager(config.sharding, registry, groups["actor"], groups["rollout"], timeout_s=60.0)
    session = Session(roles=groups, turns=turns, cluster=InProcessStore(), manager=manager)
    with closing(build_run_inputs(config, registry, folder, RunView())) as run_inputs:
        stage = rl_stage(config, registry, run_inputs, session)
        with closing(stage):
            yield stage


@pytest.fixture(scope="module")
def config(model: Path, registry: Registry, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return config_of(model, registry, tmp_path_factory.mktemp("config"))


@pytest.fixture(scope="module")
def stage(config: RunConfig, registry: Registry, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RlStage]:
    with stage_of(config, registry, tmp_path_factory.mktemp("run")) as stage:
        yield stage


@pytest.fixture(scope="module")
def requests(stage: RlStage) -> list[GenerationRequest]:
    """What the engine was asked for, in order; filled by `groups`."""
    host = stage.learner.session.rollout.group.hosts[0]  # type: ignore[attr-defined]
    seen: list[GenerationRequest] = []
    submit = host.submit_requests

    def submitted(requests: Sequence[GenerationRequest]) -> Any:
        seen.extend(requests)
        return submit(requests)

    host.submit_requests = submitted
    return seen


@pytest.fixture(scope="module")
def groups(stage: RlStage, requests: list[GenerationRequest]) -> list[Group]:
    """One step's."""
    return stage.collect(StepClock())


def first_of(groups: list[Group], question: str) -> Sample:
    (group,) = [group for group in groups if group.task.prompt.row["question"] == question]
    return group.samples[0]


@pytest.mark.parametrize(
    ("question", "text", "turns", "calls", "errors", "given"),
    [
        ("141 - 365", "c(141 - 365)=-224;#-224", 2, 1, 0, "-224"),
        ("100 + 200 + 300", "c(100 + 200)=300;c(300 + 300)=600;#600", 3, 2, 0, "600"),
        ("5 +", "c(5 +)=?;#0", 2, 1, 1, "0"),
        ("7 + 8", "#15", 1, 0, 0, "15"),
        # The fourth turn is the last one: its call is not answered. `)` is a stop token, and off the text at the end.
        ("1 + 1", "c(1 + 1)=2;c(1 + 1)=2;c(1 + 1)=2;c(1 + 1", 4, 4, 0, None),
    ],
)
def test_an_episode_goes_on_until_the_model_answers(
    groups: list[Group], question: str, text: str, turns: int, calls: int, errors: int, given: str | None
) -> None:
    sample = first_of(groups, question)
    (row,) = sample.rows
    assert sample.text == text
    assert row.info == {"turns": turns, "tool_calls": calls, "tool_errors": errors}
    assert row.extra == {"given_answer": given}
    assert row.finish_reason is FinishReason.STOP
    assert sample.grade.score == float(given == KNOWN[question][1])


def test_a_step_reports_what_trajectories_say_of_themselves(groups: list[Group]) -> None:
    assert rollout_info(groups) == pytest.approx(
        {"rollout/turns": 12 / 5, "rollout/tool_calls": 8 / 5, "rollout/tool_errors": 1 / 5}
    )


def test_what_the_tool_said_is_in_the_batch_and_off_the_mask(stage: RlStage, groups: list[Group]) -> None:
    codec = load_tokenizer(str(stage.learner.session.actor.role.model.path))
    batch = make_batch(groups, temperature=0.2).validate()
    one = batch.select([2])  # the first sample of the second prompt
    prompt = len("100 + 200 + 300>")
    shown = codec.decode(one["input_ids"])
    assert shown == "100 + 200 + 300>c(100 + 200)=300;c(300 + 300)=600;#600<eos>"
    sampled = codec.decode(one["input_ids"][one["response_mask"]])
    assert sampled == "c(100 + 200)c(300 + 300)#600<eos>"
    assert not one["response_mask"][:prompt].any()
    assert (one["token_versions"] == -1).equal(~one["response_mask"])
    assert one["rollout_log_probs"][~one["response_mask"]].abs().max() == 0.0


def test_each_turn_begins_behind_the_exact_ids_of_those_before_it(
    groups: list[Group], requests: list[GenerationRequest]
) -> None:
    for group in groups:
        asked = [r for r in requests if r.request_id.startswith(f"{group.task.id}#")]
        for index, sample in enumerate(group.samples):
            (row,) = sample.rows
            before: list[int] = []
            wanted = []
            for span in row.spans:
                if span.sampled:
                    wanted.append(tuple(before))
                before += span.token_ids.tolist()
            mine = [r for r in asked if r.first_sample <= index < r.first_sample + r.n]
            assert [r.prompt_ids for r in mine] == wanted
            assert len({r.sampling.seed for r in mine}) == len(mine)  # every turn has randomness of its own
    assert max(len(r.prompt_ids) for r in requests) > 40


def test_the_trainer_gives_every_turn_the_log_probs_of_the_sampler(stage: RlStage, groups: list[Group]) -> None:
    batch = make_batch(groups, temperature=0.2)
    again = engine_of(stage).forward(batch, ("log_probs",))["log_probs"]
    mask = batch["response_mask"]
    assert int(mask.sum()) > 150
    assert (again - batch["rollout_log_probs"])[mask].abs().max() < 1e-4


def engine_of(stage: RlStage) -> Any:
    return stage.learner.session.actor.group.hosts[0].engine  # type: ignore[attr-defined]


def weighed(batch: Batch, engine: Any, registry: Registry) -> Batch:
    """Ready for an update: a made-up advantage for each row."""
    aggregation = registry.function(ComponentKind.AGGREGATION, "token_mean")
    per_row = torch.linspace(-1.0, 1.0, batch.num_rows)
    batch = batch.with_tokens(
        advantages=per_row[batch.row_of_token] * batch["response_mask"],
        old_log_probs=engine.forward(batch, ("log_probs",))["log_probs"],
    )
    return batch.with_tokens(loss_weight=loss_weights(batch, aggregation, max_tokens=48))


def test_nothing_about_the_tools_tokens_reaches_loss_or_gradient(
    stage: RlStage, groups: list[Group], registry: Registry
) -> None:
    objective, engine = stage.learner.algorithm.objective, engine_of(stage)  # type: ignore[attr-defined]
    # Warm enough for a gradient: what was learned by heart has none left where it was sampled.
    batch = weighed(make_batch(groups, temperature=5.0), engine, registry)

    def gradient(batch: Batch) -> tuple[float, torch.Tensor]:
        loss = engine.forward_backward(batch, objective).loss
        parameters = engine.engine.parameters.values()
        found = torch.cat([p.grad.flatten().clone() for p in parameters])
        for parameter in parameters:
            parameter.grad = None
        return loss, found

    def spoilt(where: torch.Tensor) -> Batch:
        fields = ("advantages", "old_log_probs", "rollout_log_probs")
        return batch.with_tokens(**{name: torch.where(where, batch[name] - 0.5, batch[name]) for name in fields})

    mask = batch["response_mask"]
    loss, plain = gradient(batch)
    same_loss, same = gradient(spoilt(~mask))
    assert same_loss == loss
    assert same.equal(plain)
    other_loss, other = gradient(spoilt(mask))
    assert abs(other_loss - loss) > 0.01
    assert (other - plain).abs().max() > 1e-4


def test_an_episode_ends_where_the_model_has_no_more_room(model: Path, registry: Registry, tmp_path: Path) -> None:
    """In a turn, or in what a tool says: the engine is not asked for what it has no room for."""
    for room, text in ((28, "c(1 + 1)=2;c(1 + 1)=2;"), (20, "c(1 + 1)=2;c(1")):
        flags = ["--rollout.max_model_tokens", str(room), "--rollout.max_response_tokens", "4",
                 "--rollout.rollouter_options", "{turn_tokens: 9}"]  # fmt: skip
        config = config_of(model, registry, tmp_path, *flags)
        with stage_of(config, registry, tmp_path / f"room{room}") as stage:
            sample = first_of(stage.collect(StepClock()), "1 + 1")
        (row,) = sample.rows
        assert sample.text == text
        assert row.num_tokens == room
        assert row.finish_reason is FinishReason.LENGTH


OWN = '''
"""A rollouter of one's own."""
from rlsdk.interfaces import Span, Trajectory

async def careless(prompt, generate, *, forbidden="8"):
    if forbidden in prompt.text:
        raise LookupError(f"no {forbidden} here")
    turn = await generate(prompt.prompt_ids)
    return Trajectory(spans=(Span.given(prompt.prompt_ids), turn.span), finish_reason=turn.finish_reason)
'''


def test_a_rollouter_of_a_file_that_fails_costs_its_samples_and_no_more(
    model: Path, registry: Registry, tmp_path: Path
) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    constant = tmp_path / "constant.py"
    constant.write_text("def one(sample):\n    return float(len(sample.response) % 2)\n")
    config = config_of(
        model, registry, tmp_path, "--rollout.rollouter", f"{file}:careless", "--rollout.rollouter_options",
        "{forbidden: '7'}", reward=f"{constant}:one",
    )  # fmt: skip
    with stage_of(config, registry, tmp_path / "run") as stage:
        metrics = stage.advance()
    assert metrics["reward/invalid_share"] == pytest.approx(1 / 5)
    assert stage.step == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--rollout.rollouter_options", "{max_turn: 2}"],
            "rollout.rollouter_options.max_turn: 2: unknown key; did you mean 'max_turns'",
        ),
        (["--rollout.rollouter", f"{EXAMPLE / 'calculator.py'}:calcualte"], "calcualte"),
    ],
)
def test_name_and_options_are_checked_before_anything_starts(
    config: RunConfig, registry: Registry, model: Path, tmp_path: Path, flags: list[str], message: str
) -> None:
    assert check_run(config, registry, device="cpu") == []
    (problem,) = check_run(config_of(model, registry, tmp_path, *flags), registry, device="cpu")
    assert message in str(problem)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("141 - 365", -224),
        ("-224 + 200", -24),
        ("3*4", 12),
        ("2 ** 9", None),
        ("1 + 2 + 3", None),
        ("__import__('os')", None),
        ("1e9 + 1", None),
        ("1234567890 + 1", None),
        ("٣ + 1", None),
        ("1 + 2\n", None),
        ("", None),
    ],
)
def test_the_tool_knows_one_operation_on_two_whole_numbers(text: str, value: int | None) -> None:
    assert example("calculator").operate(text) == value


@pytest.fixture(scope="module")
def chat_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    example("prepare").write_model(folder, chat=True)
    shutil.copy(model / "model.safetensors", folder)
    return folder


AGENT = ["--rollout.rollouter", "single_turn", "--rollout.rollouter_options", "{}"]


def collected(model: Path, registry: Registry, folder: Path, *flags: str) -> tuple[Batch, list[Group]]:
    config = config_of(model, registry, folder, *flags)
    assert check_run(config, registry, device="cpu") == []
    with stage_of(config, registry, folder / "run") as stage:
        groups = stage.collect(StepClock())
    return make_batch(groups, temperature=0.2), groups


def test_an_agent_with_a_stock_client_makes_the_batch_of_the_rollouter(
    chat_model: Path, registry: Registry, tmp_path: Path
) -> None:
    own, _ = collected(chat_model, registry, tmp_path)
    flags = [*AGENT, "--rollout.agent", f"{EXAMPLE / 'agent.py'}:calculate", "--rollout.agent_options",
             "{max_turns: 4, turn_tokens: 20}"]  # fmt: skip
    through, groups = collected(chat_model, registry, tmp_path, *flags)
    assert own.tokens.keys() == through.tokens.keys()
    assert own.rows.keys() == through.rows.keys()
    for name in (*own.tokens, *own.rows):
        assert own[name].equal(through[name]), name
    samples = [sample for group in groups for sample in group.samples]
    assert own["scores"].tolist() == [sample.grade.score for sample in samples]
    for sample in samples:
        assert sample.episode is not None
        receipt = sample.episode.receipt
        assert receipt is not None
        assert (receipt.sampled, receipt.not_trained) == (receipt.trained, {})
        assert receipt.counts.get("continued", 0) == receipt.counts["turns"] - 1


def test_a_command_makes_the_batch_of_the_rollouter(chat_model: Path, registry: Registry, tmp_path: Path) -> None:
    few = ["--trainer.prompts_per_step", "2", "--trainer.samples_per_prompt", "2"]
    own, _ = collected(chat_model, registry, tmp_path, *few)
    command = json.dumps([sys.executable, str(EXAMPLE / "agent.py")])
    through, _ = collected(chat_model, registry, tmp_path, *few, *AGENT, "--rollout.command", command)
    for name in (*own.tokens, *own.rows):
        assert own[name].equal(through[name]), name


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {folder!r})
import agent

first = Path({mark!r})
answer_of = agent.answer_of

async def once_killed(client, question, max_turns, turn_tokens):
    given = await answer_of(client, question, max_turns, turn_tokens)
    try:
        first.touch(exist_ok=False)
    except FileExistsError:
        return given
    os.kill(os.getpid(), signal.SIGKILL)

agent.answer_of = once_killed
import asyncio
asyncio.run(agent.main())
"""


def test_an_agent_that_is_killed_is_run_again_and_gets_the_turns_that_it_had(
    chat_model: Path, registry: Registry, tmp_path: Path
) -> None:
    few = ["--trainer.prompts_per_step", "1", "--trainer.samples_per_prompt", "2"]
    own, _ = collected(chat_model, registry, tmp_path, *few)
    file = tmp_path / "killed.py"
    file.write_text(KILLED.format(folder=str(EXAMPLE), mark=str(tmp_path / "first")))
    command = json.dumps([sys.executable, str(file)])
    through, groups = collected(chat_model, registry, tmp_path, *few, *AGENT, "--rollout.command", command)
    assert (tmp_path / "first").exists()
    for name in (*own.tokens, *own.rows):
        assert own[name].equal(through[name]), name
    counts = token_account(sample for group in groups for sample in group.samples)
    assert counts["sampled"] == counts["trained"], "no turn was sampled again"


FAILS = """
import openai

async def odd(prompt, session, *, how="raise"):
    if how == "raise":
        raise LookupError("no luck")
    if how == "silent":
        return 1.0
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        while True:
            asked = [{"role": "user", "content": "1 + 1>"}]
            await client.chat.completions.create(model="m", messages=asked, max_tokens=2)

def plain(prompt, session):
    return 1.0
"""


def test_an_agent_that_fails_costs_its_samples_and_one_at_its_limit_is_trained(
    chat_model: Path, registry: Registry, tmp_path: Path
) -> None:
    file = tmp_path / "odd.py"
    file.write_text(FAILS)
    few = [*AGENT, "--trainer.prompts_per_step", "1", "--rollout.agent", f"{file}:odd"]
    for how, kind in (("raise", "agent"), ("silent", "no_calls")):
        _, (group,) = collected(chat_model, registry, tmp_path, *few, "--rollout.agent_options", f"{{how: {how}}}")
        assert [[failure.kind for failure in sample.grade.failures] for sample in group.samples] == [[kind]] * 2
    _, (group,) = collected(
        chat_model, registry, tmp_path, *few, "--rollout.agent_options", "{how: loop}", "--rollout.max_turns", "3"
    )
    for sample in group.samples:
        assert sample.episode is not None
        assert (sample.episode.ended, sample.truncated) == (Ended.TURNS, True)
        assert sample.episode.receipt is not None
        assert sample.episode.receipt.trained == 6


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rollout.agent", "{file}:plain"], "is not async: expected `async def plain(prompt, session)`"),
        (["--rollout.agent", "{file}:odd", "--rollout.agent_options", "{hw: 1}"], "did you mean 'how'"),
        (["--rollout.agent", "{file}:od"], "odd"),
    ],
)
def test_an_agent_is_checked_before_anything_starts(
    chat_model: Path, registry: Registry, tmp_path: Path, flags: list[str], message: str
) -> None:
    file = tmp_path / "odd.py"
    file.write_text(FAILS)
    given = [flag.replace("{file}", str(file)) for flag in flags]
    (problem,) = check_run(config_of(chat_model, registry, tmp_path, *AGENT, *given), registry, device="cpu")
    assert message in str(problem)
