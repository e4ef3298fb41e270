"""A whole run of training from pairs: what `rlsdk reward-model` and `rlsdk dpo` call."""

from __future__ import annotations

import functools
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from rlsdk.config import PairTraining, pair_roles
from rlsdk.trainer.roles import roles
from rlsdk.trainer.run_folder import find_checkpoint
from rlsdk.trainer.start import RunResult, Start, export_model, fit, in_lives, prepared, trainer_of
from rlsdk.trainer.supervised import pair_stage, read_pairs

if TYPE_CHECKING:
    pass


def run_pairs(start: Start, kind: PairTraining) -> RunResult:
    """Trains on pairs, gone on with where a checkpoint is found; leaves a Hugging Face folder `model/` in the run's
    folder."""
    return in_lives(start, functools.partial(_train, kind))


def _train(kind: PairTraining, start: Start) -> RunResult:
    """One session of training on pairs."""
    needed = roles(start.config, start.device, needed=kind.role_names)
    checkpoint = find_checkpoint(start.config, start.run_dir, kind.checkpoints, start.view.notice)
    start = replace(start, table=pair_roles(start.config, kind, needed), checkpoint=checkpoint)
    with prepared(start, rewarded=False, supervised=False) as (materials, cluster):
        pairs = read_pairs(materials)
        needed = roles(start.config, start.device, needed=kind.role_names)
        start = replace(start, config=pairs.config, table=pair_roles(pairs.config, kind, needed))
        session = start.start_all(cluster)
        stage = pair_stage(kind, materials, pairs, session)
        with closing(stage):
            trainer = trainer_of(start, materials, stage, session)
            if start.checkpoint is not None:
                trainer.restore(start.checkpoint)
                start.view.notice(f"resumed from {start.checkpoint} at step {stage.step}")
            start.accept()
            fit(start, trainer)
            if (best := trainer.load_best()) is not None:
                start.view.notice(f"model/ is that of the best checkpoint: {best.line()}")
        export_model(
            session,
            materials.tokenizer,
            start.run_dir / "model",
            trainer.card(),
            timeout_s=start.config.deadlines.save_s,
        )
    return RunResult(
        run_dir=start.run_dir,
        steps=stage.step,
        stopped=start.stop(),
        seconds=0.0,
        checkpoint=start.run_dir / "model",
        first_eval=stage.evaluations.first or {},
        last_eval=stage.evaluations.last or stage.last,
        best=trainer.best,
        best_checkpoint=trainer.best_checkpoint,
        ended_early=trainer.ended_early,
    )
