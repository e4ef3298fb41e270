"""Distillation on given answers, on real reference engines in this process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from pair_runs import Recorder

from rlsdk.api.resolve import resolve
from rlsdk.api.settings import Settings
from rlsdk.config import RunConfig, load_config, with_dtype
from rlsdk.config.checks.training import Training, table_of, training_problems
from rlsdk.interfaces import Batch, ConfigError
from rlsdk.registry import Registry
from rlsdk.testing.process.models import write_tiny_model
from rlsdk.testing.roles.in_process import InProcessStore, start_in_process
from rlsdk.trainer.roles.device_turns import DeviceTurns
from rlsdk.trainer.roles.placement import placed, placement_of
from rlsdk.trainer.roles.session import Session, start_roles
from rlsdk.trainer.runs.build_supervised import distill_stage
from rlsdk.trainer.runs.run_inputs import build_run_inputs
from rlsdk.trainer.stages.distill import DistillStage
from rlsdk.trainer.stages.loop import Trainer


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A student and a teacher."""
    folder = tmp_path_factory.mktemp("models")
    return str(write_tiny_model(folder / "student")), str(write_tiny_model(folder / "teacher", seed=9))


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry.discover({"RLSDK_PLUGINS": "rlsdk"})


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    made = [{"question": f"{at}+{at}=", "answer": str(2 * at) * (1 + at % 3), "task": "ab"[at % 2]} for at in range(40)]
    path.write_text("\n".join(map(json.dumps, made)))
    return str(path)


ANSWERS = ("--algorithm.distillation.sft_coef", "0.1")
"""Rows without a teacher learn their answers."""


def config_of(models: tuple[str, str], rows: str, registry: Registry, *extra: str) -> RunConfig:
    flags = [
        "--model", models[0], "--teachers", models[1], "--data", rows, "--data.max_prompt_tokens", "32",
        "--rollout.max_response_tokens", "12", "--data.num_eval_rows", "4", "--tracking.trackers", "[]",
        "--eval.every_steps", "50", "--sft.steps", "4", "--sft.rows_per_step", "6", "--sft.lr", "3e-3",
        "--algorithm.distillation.objective", "exact", "--train.micro_batch_rows", "4",
    ]  # fmt: skip
    return load_config([], [*flags, *extra], registry)


def stage_of(config: RunConfig, registry: Registry, folder: Path) -> DistillStage:
    folder.mkdir(exist_ok=True)
    table = table_of(Training.DISTILL, with_dtype(config, "cpu"))
    table = placed(table, placement_of(config.placement, [role.name for role in table], "cpu"))
    turns = DeviceTurns()
    groups = start_roles(table, lambda role: start_in_process(role, registry), turns)
    session = Session(roles=groups, turns=turns, cluster=InProcessStore())
    with closing(build_run_inputs(config, registry, folder, Recorder(), rewarded=False, taught=True)) as run_inputs:
        return distill_stage(config, run_inputs, session)


def logits(folder: str, batch: Batch) -> tuple[Any, torch.Tensor]:
    """Model and `[N, V]`: the logits that predict each token of the batch, by plain transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).double().eval()
    parts = batch["input_ids"].split(batch.lengths.tolist())
    found = [model(input_ids=ids[None]).logits[0].roll(1, 0) for ids in parts]
    return model, torch.cat(found)


@pytest.mark.parametrize(
    ("objective", "divergence", "extra"),
    [
        ("exact", "forward", ("--teachers", "TEMPERATURE")),
        ("exact", "reverse", ("--algorithm.distillation.sft_coef", "0.5", "--algorithm.distillation.coef", "2.0")),
        ("exact", "jsd", ("--algorithm.distillation.beta", "0.3", "--algorithm.distillation.sft_coef", "0.2")),
        ("top_k", "forward", ("--algorithm.distillation.top_k", "5", "--algorithm.distillation.sft_coef", "0.5")),
    ],
)
def test_loss_and_gradient_are_those_of_the_plain_formula(
    objective: str,
    divergence: str,
    extra: tuple[str, ...],
    models: tuple[str, str],
    rows: str,
    registry: Registry,
    tmp_path: Path,
) -> None:
    """In float64, by transformers: nothing of this project. One of two tasks has a teacher."""
    temperature = 2.0 if "TEMPERATURE" in extra else 1.0
    teacher = f"[{{path: {models[1]}, temperature: {temperature}, weight: 0.7, rows: {{task: [a]}}}}]"
    extra = ("--teachers", teacher, *(ANSWERS if "TEMPERATURE" in extra else extra))
    config = config_of(
        models, rows, registry, "--algorithm.distillation.objective", objective,
        "--algorithm.distillation.divergence", divergence, *extra,
    )  # fmt: skip
    stage = stage_of(config, registry, tmp_path / "run")
    stage.begin()
    drawn = stage.stream.take(9)
    batch = stage.weighed(drawn)
    engine: Any = stage.session.actor.group.hosts[0].engine  # type: ignore[attr-defined]
    found = engine.forward_backward(batch, stage.objective)
    assert found.num_micro_batches == 3
    model, policy = logits(models[0], batch)
    with torch.no_grad():
        _, other = logits(models[1], batch)
    own, given = policy.log_softmax(-1), (other / temperature).log_softmax(-1)
    if objective == "top_k":
        top = given.topk(5, -1).indices
        own, given = (
            torch.cat([one.gather(1, top), (1 - one.gather(1, top).exp().sum(1, keepdim=True)).log()], 1)
            for one in (own, given)
        )
    settings = config.algorithm.distillation
    mean = (settings.beta * given.exp() + (1 - settings.beta) * own.exp()).log()
    apart = {
        "forward": (given.exp() * (given - own)).sum(1),
        "reverse": (own.exp() * (own - given)).sum(1),
        "jsd": settings.beta * (given.exp() * (given - mean)).sum(1)
        + (1 - settings.beta) * (own.exp() * (own - mean)).sum(1),
    }[divergence]
    nll = -policy.log_softmax(-1).gather(1, batch["input_ids"][:, None])[:, 0]
    taught = torch.tensor([prompt.row["task"] == "a" for prompt in drawn])[batch.row_of_token]
    weight = batch["response_mask"] / batch["response_mask"].sum()
    loss = (weight * (settings.coef * 0.7 * taught * apart + settings.sft_coef * nll)).sum()
    loss.backward()
    assert found.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            engine.engine.parameters[name].grad.double(), parameter.grad, rtol=1e-3, atol=2e-6, msg=name
        )


def test_a_student_comes_to_give_its_teachers_probabilities(
    models: tuple[str, str], rows: str, registry: Registry, tmp_path: Path
) -> None:
    config = config_of(models, rows, registry, "--sft.steps", "40", "--algorithm.distillation.divergence", "forward")
    stage = stage_of(config, registry, tmp_path / "run")
    stage.begin()
    steps = [stage.advance() for _ in range(40)]
    assert steps[-1]["distill/divergence"] < 0.4 * steps[0]["distill/divergence"]
    assert steps[0]["distill/teacher_share"] == pytest.approx(1.0)
    assert steps[0]["sft/loss"] == pytest.approx(steps[0]["distill/divergence"])


def test_training_that_is_resumed_goes_on_number_for_number(
    models: tuple[str, str], rows: str, registry: Registry, tmp_path: Path
) -> None:
    config = config_of(models, rows, registry, "--sft.steps", "5", "--sft.save_every_steps", "2")

    def last_of(folder: Path, stop: int) -> Mapping[str, float]:
        """Metrics of the last step, from the newest checkpoint of the folder where there is one."""
        stage = stage_of(config, registry, folder)
        trainer = Trainer(
            stage, stage.session, tokenizer=None, config_text="", keep_checkpoints=2, stop=lambda: stage.step >= stop
        )
        with closing(stage):
            if (newest := trainer.store.newest()) is not None:
                assert newest.parent.name == Training.DISTILL.checkpoints
                trainer.restore(newest)
            trainer.fit()
        return {name: value for name, value in stage.last.items() if name != "sft/step_s"}

    whole = last_of(tmp_path / "whole", 5)
    assert last_of(tmp_path / "part", 3) != whole
    assert last_of(tmp_path / "part", 5) == whole


@pytest.mark.parametrize(("typed", "chosen"), [((), "exact"), (("top_k",), "top_k")])
def test_the_command_learns_exactly_unless_something_else_is_chosen(
    typed: tuple[str, ...], chosen: str, models: tuple[str, str], rows: str
) -> None:
    """`sampled`, the default of on-policy distillation, would be refused."""
    flags = ["--model", models[0], "--teachers", models[1], "--data", rows, "--sft.steps", "1"]
    for objective in typed:
        flags += ["--algorithm.distillation.objective", objective]
    prepared = resolve(Settings(flags=flags), Training.DISTILL, device="cpu")
    assert prepared.config.algorithm.distillation.objective == chosen


def test_another_tokenizer_and_rows_are_refused_when_the_run_is_prepared(
    models: tuple[str, str], rows: str, tmp_path: Path
) -> None:
    """Before Ray or a device, and before torch."""
    flags = ["--model", models[0], "--data", rows, "--sft.steps", "1", "--teachers"]
    tokenizer = json.loads((Path(models[0]) / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["3"], vocabulary["7"] = vocabulary["7"], vocabulary["3"]
    shutil.copytree(models[1], tmp_path / "other")
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"teachers.0.path: .*token \d+ is '3' here and is '7' there"):
        resolve(Settings(flags=[*flags, str(tmp_path / "other")]), Training.DISTILL, device="cpu")
    wrong = json.dumps([{"path": models[1], "rows": {"tsk": ["a"]}}])
    with pytest.raises(ConfigError, match=r"teachers.0.rows.tsk: no data row has a field 'tsk'; did you mean 'task'"):
        resolve(Settings(flags=[*flags, wrong]), Training.DISTILL, device="cpu")


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (("--algorithm.distillation.objective", "sampled"), "given answers are not samples of the policy"),
        (("--teachers", "[{path: T, rollout: {}}]", "--algorithm.distillation.objective", "top_k"), "a train engine"),
        (("--teachers", "[]"), "at least one"),
        (("--sft.steps", "0"), "trains nothing"),
        (("--algorithm.distillation.coef", "0"), "teaches nothing"),
    ],
)
def test_what_cannot_teach_is_refused_by_name(
    extra: tuple[str, ...], said: str, models: tuple[str, str], rows: str, registry: Registry
) -> None:
    config = config_of(models, rows, registry, *(word.replace("T,", f"{models[1]},") for word in extra))
    problems = list(training_problems(Training.DISTILL, config))
    assert any(said in str(problem) for problem in problems), problems
