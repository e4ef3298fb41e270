"""A whole run of supervised training (`rlsdk sft`), and the warm start of other runs."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

from rlsdk.config import Role, RunConfig, sft_optim_spec
from rlsdk.config.sections.role_names import ACTOR
from rlsdk.interfaces import ConfigError
from rlsdk.trainer.checkpoints.run_folder import find_checkpoint
from rlsdk.trainer.roles.placement import roles
from rlsdk.trainer.roles.session import Session
from rlsdk.trainer.runs.build_supervised import sft_stage
from rlsdk.trainer.runs.prepare import (
    RunResult,
    Start,
    export_final_model,
    fit,
    load_best,
    prepared,
    result_of,
    resumed_line,
    trainer_of,
    with_restarts,
)
from rlsdk.trainer.runs.run_inputs import RunInputs
from rlsdk.trainer.stages.loop import Trainer
from rlsdk.trainer.stages.sft import CHECKPOINTS, SftStage


def run_sft(start: Start) -> RunResult:
    """Runs supervised training alone; writes the Hugging Face folder `model/` into the run's folder."""
    if not start.config.sft.is_asked:
        raise ConfigError("sft.steps: 0 trains nothing; give --sft.steps N or --sft.epochs N")
    return with_restarts(start, _train_supervised)


def _train_supervised(start: Start) -> RunResult:
    """Runs one session of supervised training."""
    half_way = find_checkpoint(start.config, start.run_dir, CHECKPOINTS, start.view.notice)
    start = replace(start, half_way=half_way, table=_sft_table(start.config, start.device))
    with prepared(start, rewarded=False) as (run_inputs, cluster):
        start = replace(start, config=run_inputs.config, table=_sft_table(run_inputs.config, start.device))
        session = start.start_all(cluster)
        done, trainer = supervise(start, run_inputs, session, measured=True)
        model = export_final_model(start, trainer)
    return result_of(start, trainer, {**done.last, **done.evaluations.last}, model)


def supervise(
    start: Start, run_inputs: RunInputs, session: Session, *, measured: bool = False
) -> tuple[SftStage, Trainer]:
    """Runs supervised training, resumed from its checkpoint if there is one. The actor ends with the best weights if
    `measured` and a metric selects them."""
    stage = sft_stage(start.config, run_inputs, session, measured=measured)
    with closing(stage):
        trainer = trainer_of(start, run_inputs, stage, session)
        if start.half_way is not None:
            trainer.restore(start.half_way)
            line = resumed_line(start.half_way, stage.step, stage.settings.steps, field="sft.steps")
            start.view.notice(f"supervised training {line}")
        start.accept()
        fit(start, trainer)
        load_best(start, trainer)
    return stage, trainer


def _sft_table(config: RunConfig, device: str) -> list[Role]:
    """The actor's role, with the optimizer of supervised training."""
    return [role.with_optim(sft_optim_spec(config)) for role in roles(config, device, needed=[ACTOR])]
