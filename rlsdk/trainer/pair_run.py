"""A whole run of training from pairs: what `rlsdk reward-model` and `rlsdk dpo` call."""

from __future__ import annotations

import functools
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlsdk.config import PairTraining, RunConfig, pair_roles, with_dtype
from rlsdk.trainer.lives import Lives
from rlsdk.trainer.roles import roles
from rlsdk.trainer.run import RunResult, Start, export_model, fit, prepared, trainer_of
from rlsdk.trainer.run_folder import find_checkpoint, run_lock
from rlsdk.trainer.session import Session, start_roles
from rlsdk.trainer.stopping import StopFlag
from rlsdk.trainer.supervised import pair_stage, read_pairs

if TYPE_CHECKING:
    from rlsdk.cluster import ClusterAhead
    from rlsdk.registry import Registry
    from rlsdk.trainer.events import RunView


def run_pairs(
    config: RunConfig,
    kind: PairTraining,
    registry: Registry,
    view: RunView,
    *,
    run_dir: Path,
    device: str,
    stop: StopFlag,
    ahead: ClusterAhead | None = None,
) -> RunResult:
    """Trains on pairs, gone on with where a checkpoint is found; leaves a Hugging Face folder `model/` in the run's
    folder. `ahead`: the cluster, where it was begun before."""
    began = time.perf_counter()
    config = with_dtype(config, device)
    with run_lock(run_dir):
        lives = Lives(config, run_dir, view, stop)
        result = lives.run(
            lambda config: _train(
                kind,
                Start(
                    config=config,
                    registry=registry,
                    run_dir=run_dir,
                    device=device,
                    table=pair_roles(config, kind, roles(config, device, needed=kind.role_names)),
                    checkpoint=find_checkpoint(config, run_dir, kind.checkpoints, view.notice),
                    view=view,
                    stop=stop,
                    lives=lives,
                    ahead=ahead,
                ),
            )
        )
    return replace(result, seconds=time.perf_counter() - began)


def _train(kind: PairTraining, start: Start) -> RunResult:
    """One session of training on pairs."""
    with prepared(start, rewarded=False, supervised=False) as (materials, cluster):
        pairs = read_pairs(materials)
        needed = roles(start.config, start.device, needed=kind.role_names)
        start = replace(start, config=pairs.config, table=pair_roles(pairs.config, kind, needed))
        turns = start.turns()
        make = functools.partial(start.start_role, cluster=cluster)
        session = Session(roles=start_roles(start.table, make, turns, at_once=True), turns=turns, cluster=cluster)
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
