"""A whole run of training from pairs: `rlsdk reward-model` and `rlsdk dpo`."""

from __future__ import annotations

import functools
from contextlib import closing
from dataclasses import replace

from rlsdk.config import PairTraining, pair_roles
from rlsdk.trainer.checkpoints.run_folder import find_checkpoint
from rlsdk.trainer.roles.placement import roles
from rlsdk.trainer.runs.build_supervised import pair_stage, read_pairs
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


def run_pairs(start: Start, kind: PairTraining) -> RunResult:
    """Trains on pairs, resumed if a checkpoint is found; writes the Hugging Face folder `model/` of the run."""
    return with_restarts(start, functools.partial(_train, kind))


def _train(kind: PairTraining, start: Start) -> RunResult:
    """Runs one session of training on pairs."""
    needed = roles(start.config, start.device, needed=kind.role_names)
    checkpoint = find_checkpoint(start.config, start.run_dir, kind.checkpoints, start.view.notice)
    start = replace(start, table=pair_roles(start.config, kind, needed), checkpoint=checkpoint)
    with prepared(start, rewarded=False, supervised=False, of_pairs=True) as (run_inputs, cluster):
        pairs = read_pairs(run_inputs)
        needed = roles(start.config, start.device, needed=kind.role_names)
        start = replace(start, config=pairs.config, table=pair_roles(pairs.config, kind, needed))
        session = start.start_all(cluster)
        stage = pair_stage(kind, run_inputs, pairs, session)
        with closing(stage):
            trainer = trainer_of(start, run_inputs, stage, session)
            if start.checkpoint is not None:
                trainer.restore(start.checkpoint)
                line = resumed_line(start.checkpoint, stage.step, stage.settings.steps, field="preferences.steps")
                start.view.notice(line)
            start.accept()
            fit(start, trainer)
            load_best(start, trainer)
        model = export_final_model(start, trainer)
    return result_of(start, trainer, stage.evaluations.last or stage.last, model)
