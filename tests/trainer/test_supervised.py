"""Supervised training on real reference engines in this process: a stage of the same loop."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_loop import HERE, Recorder, config_of, model, registry

from rlsdk.config import Role, sft_optim_spec
from rlsdk.interfaces import TrainEngine, UnsupportedCapabilityError
from rlsdk.registry import Registry
from rlsdk.testing.roles.in_process import InProcessStore, start_in_process
from rlsdk.trainer.checkpoints.run_folder import ResumePoint
from rlsdk.trainer.roles.device_turns import DeviceTurns
from rlsdk.trainer.roles.placement import roles
from rlsdk.trainer.roles.role_group import RoleGroup
from rlsdk.trainer.roles.session import Session, start_roles
from rlsdk.trainer.runs import rl as run
from rlsdk.trainer.runs.build_supervised import sft_stage
from rlsdk.trainer.runs.run_inputs import RunInputs, build_run_inputs
from rlsdk.trainer.stages import forward_parts
from rlsdk.trainer.stages.loop import Trainer
from rlsdk.trainer.tracking.stopping import EvaluationStoppedError

__all__ = ["model", "registry"]


def test_supervised_training_is_a_stage_of_the_same_loop(model: str, registry: Registry, tmp_path: Path) -> None:
    config = config_of(model, registry, 1, "--sft.steps", "4", "--sft.lr", "1e-3", "--sft.save_every_steps", "2")
    (role,) = roles(config, "cpu", needed=["actor"])
    losses: list[list[float]] = []
    for stop_after in (2, 99):
        turns = DeviceTurns()
        groups = start_roles(
            [role.with_optim(sft_optim_spec(config))], lambda role: start_in_process(role, registry), turns
        )
        session = Session(roles=groups, turns=turns, cluster=InProcessStore())
        with closing(build_run_inputs(config, registry, tmp_path, Recorder(), rewarded=False)) as run_inputs:
            stage = sft_stage(config, run_inputs, session)
            trainer = Trainer(
                stage, session, tokenizer=run_inputs.tokenizer, config_text="", keep_checkpoints=2,
                stop=lambda stage=stage, after=stop_after: stage.step >= after,
            )  # fmt: skip
            with closing(stage):
                newest = trainer.store.newest()
                if newest is not None:
                    trainer.restore(newest)
                trainer.fit()
                losses.append([stage.step, stage.last["sft/loss"]])
    assert [step for step, _ in losses] == [2, 4]
    assert losses[1][1] < losses[0][1]
    assert json.loads(json.dumps(losses)) == losses


def test_supervised_training_keeps_the_weights_that_do_best_on_held_out_answers(
    model: str, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which are measured in parts; a run that is asked to end between two of them has no figures."""
    monkeypatch.setattr(forward_parts, "ROWS_A_CALL", 6)
    config = config_of(
        model, registry, 1, "--sft.steps", "6", "--sft.lr", "1e-3", "--sft.save_every_steps", "2",
        "--eval.every_steps", "1", "--checkpoint.best", "{metric: sft/eval_loss, mode: min}",
        "--eval.early_stopping", "{metric: sft/eval_loss, mode: min, patience: 2, min_delta: 100}",
    )  # fmt: skip
    (role,) = roles(config, "cpu", needed=["actor"])
    turns = DeviceTurns()
    groups = start_roles(
        [role.with_optim(sft_optim_spec(config))], lambda role: start_in_process(role, registry), turns
    )
    session = Session(roles=groups, turns=turns, cluster=InProcessStore())
    view = Recorder()
    with closing(build_run_inputs(config, registry, tmp_path, view, rewarded=False)) as run_inputs:
        stage = sft_stage(config, run_inputs, session, measured=True)
        trainer = Trainer(stage, session, tokenizer=run_inputs.tokenizer, config_text="", keep_checkpoints=1)
        with closing(stage):
            trainer.fit()
            assert stage.step == 2  # no evaluation was better by 100 nats
            assert trainer.best is not None
            loss = {at: found["sft/eval_loss"] for at, found in enumerate(view.evals)}
            assert trainer.best.step == min((1, 2), key=lambda step: loss[step])
            batch = stage.evaluations._evaluate
            assert batch is not None
            assert batch().metrics["sft/eval_loss"] == pytest.approx(loss[2])
            expected = plain_loss(session, run_inputs)
            assert loss[2] == pytest.approx(expected, rel=1e-4)
            looks: list[int] = []

            def stops_at_the_second_part() -> bool:
                looks.append(len(looks))
                return len(looks) == 3

            stage.evaluations.stop = stops_at_the_second_part
            with pytest.raises(EvaluationStoppedError):
                stage.evaluations.measure(2)
            assert stage.evaluations.missed == 2
            assert len(view.evals) == 3


def test_supervised_training_that_is_stopped_in_its_last_evaluation_is_measured_when_it_goes_on(
    model: str, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It saves nothing behind its last step, but for what it has not measured yet."""
    monkeypatch.setattr(forward_parts, "ROWS_A_CALL", 6)
    config = config_of(
        model, registry, 1, "--sft.steps", "2", "--sft.lr", "1e-3", "--sft.save_every_steps", "1",
        "--eval.every_steps", "1", "--checkpoint.best", "{metric: sft/eval_loss, mode: min}",
    )  # fmt: skip
    (role,) = roles(config, "cpu", needed=["actor"])
    views, best = [], []
    for stops in (True, False):
        turns, view = DeviceTurns(), Recorder()
        groups = start_roles(
            [role.with_optim(sft_optim_spec(config))], lambda role: start_in_process(role, registry), turns
        )
        session = Session(roles=groups, turns=turns, cluster=InProcessStore())
        with closing(build_run_inputs(config, registry, tmp_path, view, rewarded=False)) as run_inputs:
            stage = sft_stage(config, run_inputs, session, measured=True)
            trainer = Trainer(
                stage, session, tokenizer=run_inputs.tokenizer, config_text="", keep_checkpoints=2,
                stop=lambda stage=stage, stops=stops: stops and stage.step == 2,
            )  # fmt: skip
            stage.evaluations.stop = trainer.stop
            with closing(stage):
                newest = trainer.store.newest()
                if newest is not None:
                    assert newest.name == "step_00000002"
                    trainer.restore(newest)
                trainer.fit()
            assert stage.step == 2
            views.append(len(view.evals))
            best.append(None if trainer.best is None else trainer.best.step)
    assert views == [2, 1], "of steps 0, 1 and 2"
    assert best[0] == 1
    assert best[1] in (1, 2)


def plain_loss(session: Session, run_inputs: RunInputs) -> float:
    """Of the held-out answers' tokens, row by row, by the module itself."""
    module = session.actor.group.hosts[0].engine.engine.model  # type: ignore[attr-defined]
    total, count = 0.0, 0
    for prompt in run_inputs.eval_prompts["held_out"]:
        answer = [*run_inputs.tokenizer(prompt.answer)["input_ids"], run_inputs.tokenizer.eos_token_id]
        ids = torch.tensor([[*prompt.prompt_ids, *answer]])
        with torch.no_grad():
            log_probs = module(input_ids=ids).logits.float().log_softmax(-1)[0, :-1]
        found = log_probs.gather(-1, ids[0, 1:, None])[:, 0][-len(answer) :]
        total, count = total - float(found.sum()), count + len(answer)
    return total / count


def test_supervised_training_lasts_as_many_steps_as_its_epochs_come_to(
    model: str, registry: Registry, tmp_path: Path
) -> None:
    config = config_of(model, registry, 1, "--sft.epochs", "0.5", "--sft.rows_per_step", "10")
    with closing(build_run_inputs(config, registry, tmp_path, Recorder(), rewarded=False)) as run_inputs:
        assert run_inputs.learned is not None
        assert len(run_inputs.learned[0]) == 100
        assert run_inputs.config.sft.steps == 5
    with closing(build_run_inputs(config, registry, tmp_path, Recorder(), supervised=False)) as run_inputs:
        assert run_inputs.config.sft.steps == 5  # a run that is resumed knows


def test_callbacks_belong_to_the_steps_of_reinforcement_learning(
    model: str, registry: Registry, tmp_path: Path
) -> None:
    config = config_of(
        model, registry, 1, "--sft.steps", "4", "--trainer.callbacks", f"[{HERE / 'rewards.py'}:stop_at_three]"
    )
    with closing(build_run_inputs(config, registry, tmp_path, Recorder())) as run_inputs:
        (role,) = roles(config, "cpu", needed=["actor"])
        groups = start_roles([role], lambda role: start_in_process(role, registry), DeviceTurns())
        session = Session(roles=groups, turns=DeviceTurns(), cluster=InProcessStore())
        with closing(sft_stage(config, run_inputs, session)) as stage:
            assert list(stage.output.callbacks) == []
            assert stage.output.trackers is run_inputs.output.trackers


def test_an_engine_that_cannot_begin_anew_is_refused_before_supervised_training(
    model: str, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(model, registry, 1, "--sft.steps", "4")

    def started(role: Role, cluster: object) -> RoleGroup:
        group = start_in_process(role, registry)
        engine = group.group.hosts[0].engine.engine  # type: ignore[attr-defined]
        monkeypatch.setattr(type(engine), "reset_optimizer", TrainEngine.reset_optimizer)
        return group

    table = roles(config, "cpu", needed=["actor"])
    start: Any = SimpleNamespace(  # all that is read before supervised training
        config=config, resume=ResumePoint(), table=table, turns=DeviceTurns, start_role=started
    )
    cluster: Any = InProcessStore()
    with (
        closing(build_run_inputs(config, registry, tmp_path, Recorder(), rewarded=False)) as run_inputs,
        pytest.raises(UnsupportedCapabilityError, match="run `rlsdk sft` first"),
    ):
        run._warm_start(start, cluster, run_inputs)
    assert not any(tmp_path.iterdir())
