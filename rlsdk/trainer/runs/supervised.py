"""A whole run of supervised training (`rlsdk sft`) or from preferences (`rlsdk reward-model`, `dpo`, `kto`,
`process-reward`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlsdk.config import PairTraining
from rlsdk.trainer.runs.build_supervised import distill_stage, pair_stage, read_pairs, sft_stage
from rlsdk.trainer.runs.start import RunResult, SessionStart, export_final_model, result_of, train_stage

if TYPE_CHECKING:
    from rlsdk.cluster import Cluster
    from rlsdk.trainer.roles.session import Session
    from rlsdk.trainer.runs.run_inputs import RunInputs
    from rlsdk.trainer.stages.loop import Trainer
    from rlsdk.trainer.stages.sft import SftStage


def train_sft(start: SessionStart, run_inputs: RunInputs, cluster: Cluster) -> RunResult:
    """Supervised training alone; writes the Hugging Face folder `model/` into the run's folder."""
    stage, trainer = supervise(start, run_inputs, start.start_all(cluster), measured=True)
    model = export_final_model(start, trainer)
    return result_of(start, trainer, {**stage.last, **stage.evaluations.last}, model)


def train_distill(start: SessionStart, run_inputs: RunInputs, cluster: Cluster) -> RunResult:
    """Distillation on given answers; writes the Hugging Face folder `model/` into the run's folder."""
    session = start.start_all(cluster)
    stage = distill_stage(start.config, run_inputs, session, measured=True)
    trainer = train_stage(start, run_inputs, stage, session, field="sft.steps")
    model = export_final_model(start, trainer)
    return result_of(start, trainer, {**stage.last, **stage.evaluations.last}, model)


def supervise(
    start: SessionStart, run_inputs: RunInputs, session: Session, *, measured: bool = False
) -> tuple[SftStage, Trainer]:
    """Runs supervised training, resumed from its checkpoint if there is one. The actor ends with the best weights if
    `measured` and a metric selects them."""
    stage = sft_stage(start.config, run_inputs, session, measured=measured)
    return stage, train_stage(start, run_inputs, stage, session, field="sft.steps", said="supervised training ")


def train_pairs(kind: PairTraining, start: SessionStart, run_inputs: RunInputs, cluster: Cluster) -> RunResult:
    """Trains on pairs, labelled answers or steps; writes the Hugging Face folder `model/` of the run."""
    pairs = read_pairs(kind, run_inputs)
    start = start.with_config(pairs.config)
    session = start.start_all(cluster)
    if session.is_own_reference and start.config.model.lora.path is not None:
        session.keep_reference(timeout_s=start.config.deadlines.update_s)
    stage = pair_stage(kind, run_inputs, pairs, session)
    trainer = train_stage(start, run_inputs, stage, session, field="preferences.steps")
    model = export_final_model(start, trainer)
    return result_of(start, trainer, stage.evaluations.last or stage.last, model)
