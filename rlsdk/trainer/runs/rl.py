"""A session of reinforcement learning, with its warm start (`rlsdk train`)."""

from __future__ import annotations

import functools
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlsdk.config import role_of, sft_optim_spec
from rlsdk.config.sections.role_kinds import ACTOR
from rlsdk.trainer.checkpoints.checkpoint import read_state
from rlsdk.trainer.checkpoints.reference import FOLDER, find_reference, seal_reference
from rlsdk.trainer.checkpoints.run_folder import CHECKPOINTS
from rlsdk.trainer.roles.session import Session, sharding_manager, start_roles
from rlsdk.trainer.runs.build_rl import algorithm_of, rl_stage
from rlsdk.trainer.runs.run_inputs import RunInputs
from rlsdk.trainer.runs.start import (
    RunResult,
    SessionStart,
    export_model,
    fit,
    result_of,
    resumed_line,
    trainer_of,
)
from rlsdk.trainer.runs.supervised import supervise

if TYPE_CHECKING:
    from rlsdk.cluster import Cluster
    from rlsdk.interfaces import OptimSpec
    from rlsdk.trainer.roles.role_group import RoleGroup
    from rlsdk.trainer.stages.loop import Trainer


def train_rl(start: SessionStart, run_inputs: RunInputs, cluster: Cluster) -> RunResult:
    """One session of reinforcement learning, after the warm start if one is configured and not done."""
    view, checkpoint = start.view, start.resume.within(CHECKPOINTS)
    # Options that the algorithm refuses are refused before a device is taken.
    algorithm = algorithm_of(start.config, start.registry, run_inputs)
    warmed = _warm_start(start, cluster, run_inputs)
    if warmed is not None and start.stop():
        return _ended_in_warm_start(start, warmed.trainer)
    session = _rl_session(start, cluster, warmed)
    stage = rl_stage(start.config, start.registry, run_inputs, session, algorithm)
    with closing(stage):
        trainer = trainer_of(start, run_inputs, stage, session)
        if checkpoint is not None:
            trainer.restore(checkpoint)
            start.accept()
            view.notice(resumed_line(checkpoint, stage.step, stage.settings.steps))
        fit(start, trainer)
        if warmed is not None and start.stop() and stage.step == 0:
            _keep(warmed.trainer)
        return result_of(start, trainer, stage.evaluations.last, trainer.last_checkpoint)


def say_recipe(start: SessionStart) -> None:
    """Reports the dtype and the algorithm."""
    config, view = start.config, start.view
    view.notice(f"dtype {config.model.dtype} on {start.run.device}, float32 weights in the optimizer")
    if (recipe := config.algorithm.recipe) is not None:
        view.notice(f"algorithm {recipe}: {config.algorithm.advantage}, {config.algorithm.loss}")


@dataclass(frozen=True, kw_only=True)
class _WarmStart:
    """Result of the warm start for reinforcement learning."""

    session: Session
    """Session with the actor alone."""
    trainer: Trainer


def _warm_start(start: SessionStart, cluster: Cluster, run_inputs: RunInputs) -> _WarmStart | None:
    """Trains the actor with supervision; None if this is not configured or already done."""
    if not start.config.sft.is_asked or start.resume.within(CHECKPOINTS) is not None:
        return None
    actor, turns = role_of(start.table, ACTOR).with_optim(sft_optim_spec(start.config)), start.turns()
    groups = start_roles([actor], functools.partial(start.start_role, cluster=cluster), turns)
    session = Session(roles=groups, turns=turns, cluster=cluster)
    _reset_optimizer(start, session, actor.optim)  # An engine that cannot do this fails here, before hours of training.
    return _WarmStart(session=session, trainer=supervise(start, run_inputs, session)[1])


def _reset_optimizer(start: SessionStart, session: Session, optim: OptimSpec | None) -> None:
    """Gives the actor a new optimizer for reinforcement learning."""
    with session.turns.using(ACTOR, training=True):
        session.actor.run("reset_optimizer", optim, timeout_s=start.config.deadlines.update_s)


def _ended_in_warm_start(start: SessionStart, trainer: Trainer) -> RunResult:
    """Result of a run that was stopped during its warm start: nothing else is started or evaluated."""
    _keep(trainer)
    stage = trainer.stage
    start.view.notice(f"stopped in supervised training, after {stage.step} of {stage.settings.steps} steps of it")
    return replace(result_of(start, trainer, {}, None), steps=0)


def _keep(trainer: Trainer) -> None:
    """Saves the warm start if its last step has no checkpoint (a checkpoint of reinforcement learning should have
    followed)."""
    if trainer.stage.step and trainer.last_checkpoint != trainer.store.path_of(trainer.stage.step):
        trainer.save()


def _rl_session(start: SessionStart, cluster: Cluster, warmed: _WarmStart | None) -> Session:
    """Starts the roles. The reference policy is the one that RL starts from, so it is loaded after the warm start."""
    config, checkpoint = start.config, start.resume.within(CHECKPOINTS)
    make = functools.partial(start.start_role, cluster=cluster)
    rest = list(start.table)
    groups: dict[str, RoleGroup] = {}
    turns = start.turns()
    if warmed is not None:
        groups, turns = dict(warmed.session.roles), warmed.session.turns
        rest = [role for role in rest if role.name != ACTOR]
        _reset_optimizer(start, warmed.session, role_of(start.table, ACTOR).optim)
        if any(role.starts_as_policy for role in rest):
            tokenizer, timeout_s = warmed.trainer.tokenizer, config.deadlines.save_s
            export_model(warmed.session, tokenizer, start.run_dir / FOLDER, timeout_s=timeout_s)
            seal_reference(start.run_dir / FOLDER)
    reference = reference_of(start, checkpoint)
    if reference is not None:
        rest = [role.with_model(str(reference)) if role.starts_as_policy else role for role in rest]
    groups |= start_roles(rest, make, turns, at_once=True)
    if not config.sft.is_asked and checkpoint is None:
        start.accept()
    session = Session(roles={role.name: groups[role.name] for role in start.table}, turns=turns, cluster=cluster)
    if session.is_own_reference and checkpoint is None and (warmed is not None or config.model.lora.path is not None):
        session.keep_reference(timeout_s=config.deadlines.update_s)
    manager = sharding_manager(
        config.sharding, start.registry, session.actor, session.rollout, timeout_s=config.deadlines.sync_s
    )
    return replace(session, manager=manager, reference=reference)


def reference_of(start: SessionStart, checkpoint: Path | None) -> Path | None:
    """Folder of the reference policy: the model after the warm start of this run or of the run that is resumed. None if
    it is the configured model.

    Raises:
        CheckpointError: the resumed run's reference no longer exists.
    """
    warms_up = start.config.sft.is_asked
    if not any(role.starts_as_policy for role in start.table):
        return None
    if checkpoint is not None:
        return find_reference(read_state(checkpoint), checkpoint, warmed_up=warms_up)
    return start.run_dir / FOLDER if warms_up else None
