"""A whole run of reinforcement learning, from a checked configuration to the last line: what `rlsdk train` calls."""

from __future__ import annotations

import functools
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlsdk.config import RunConfig, needed_roles, role_of, sft_optim_spec
from rlsdk.config.role_names import ACTOR, REF
from rlsdk.trainer.assemble import rl_stage
from rlsdk.trainer.checkpoint import read_state
from rlsdk.trainer.materials import Materials
from rlsdk.trainer.reference import FOLDER, find_reference
from rlsdk.trainer.roles import roles
from rlsdk.trainer.run_folder import find_checkpoint
from rlsdk.trainer.session import Session, sharding_manager, start_roles
from rlsdk.trainer.sft import CHECKPOINTS
from rlsdk.trainer.sft_run import supervise
from rlsdk.trainer.start import RunResult, Start, export_model, fit, in_lives, prepared, result_of, trainer_of

if TYPE_CHECKING:
    from rlsdk.cluster import Cluster
    from rlsdk.interfaces import OptimSpec


def run_train(start: Start) -> RunResult:
    """Warm start where asked for, then reinforcement learning; resumes where a checkpoint is found."""
    config, view = start.config, start.view
    view.notice(f"dtype {config.model.dtype} on {start.device}, float32 weights in the optimizer")
    if (recipe := config.algorithm.recipe) is not None:
        view.notice(f"algorithm {recipe}: {config.algorithm.advantage}, {config.algorithm.loss}")
    return in_lives(start, _train)


def _train(start: Start) -> RunResult:
    """One session of a run, from where `trainer.resume` says."""
    config, view = start.config, start.view
    start = replace(start, table=roles(config, start.device))
    checkpoint = find_checkpoint(config, start.run_dir, notice=view.notice)
    half_way = None
    if checkpoint is None and config.sft.is_asked:
        half_way = find_checkpoint(config, start.run_dir, CHECKPOINTS, view.notice)
    start = replace(start, checkpoint=checkpoint, half_way=half_way)
    with prepared(start, supervised=checkpoint is None) as (materials, cluster):
        start = replace(start, config=materials.config, table=roles(materials.config, start.device))
        session = _rl_session(start, cluster, materials)
        stage = rl_stage(start.config, start.registry, materials, session)
        with closing(stage):
            trainer = trainer_of(start, materials, stage, session)
            if checkpoint is not None:
                trainer.restore(checkpoint)
                start.accept()
                view.notice(resumed_line(checkpoint, stage.step, start.config.trainer.steps))
            fit(start, trainer)
            return result_of(start, trainer, stage.evaluations.last, trainer.last_checkpoint)


def resumed_line(checkpoint: Path, step: int, steps: int) -> str:
    """Where a run continues, or that it was finished before."""
    line = f"resumed from {checkpoint} at step {step}"
    if step < steps:
        return line
    return f"{line}: all {steps} steps were made before, so nothing is trained; `--trainer.steps {2 * step}` continues"


def _warm_start(start: Start, materials: Materials, session: Session, optim: OptimSpec | None) -> None:
    """Supervised training of the actor, whose optimizer begins anew behind it."""

    def begin_anew(optim: OptimSpec | None) -> None:
        with session.turns.using(ACTOR, training=True):
            session.actor.run("reset_optimizer", optim, timeout_s=start.config.deadlines.update_s)

    begin_anew(sft_optim_spec(start.config))  # An engine that cannot says so before it has trained for hours.
    supervise(start, materials, session)
    begin_anew(optim)


def _rl_session(start: Start, cluster: Cluster, materials: Materials) -> Session:
    """Starts the roles. The reference policy is the one that RL starts from, so it comes after the warm start."""
    config, turns = start.config, start.turns()
    make = functools.partial(start.start_role, cluster=cluster)
    actor, rest = role_of(start.table, ACTOR), [role for role in start.table if role.name != ACTOR]
    if config.sft.is_asked and start.checkpoint is None:
        groups = start_roles([actor.with_optim(sft_optim_spec(config))], make, turns)
        session = Session(roles=groups, turns=turns, cluster=cluster)
        _warm_start(start, materials, session, actor.optim)
        if any(role.name == REF for role in rest):
            export_model(session, materials.tokenizer, start.run_dir / FOLDER, timeout_s=config.deadlines.save_s)
    else:
        groups, rest = {}, [actor, *rest]
    reference = reference_of(config, start.run_dir, start.checkpoint)
    if reference is not None:
        rest = [role.with_model(str(reference)) if role.name == REF else role for role in rest]
    groups |= start_roles(rest, make, turns, at_once=True)
    if not config.sft.is_asked and start.checkpoint is None:
        start.accept()
    session = Session(roles={role.name: groups[role.name] for role in start.table}, turns=turns, cluster=cluster)
    manager = sharding_manager(
        config.sharding, start.registry, session.actor, session.rollout, timeout_s=config.deadlines.sync_s
    )
    return replace(session, manager=manager, reference=reference)


def reference_of(config: RunConfig, run_dir: Path, checkpoint: Path | None) -> Path | None:
    """The folder of the reference policy where it is not the model that is configured: what the warm start of this run
    came to, or of the run that is resumed.

    Raises:
        CheckpointError: the run that is resumed had one that is not there any more.
    """
    if REF not in needed_roles(config) or config.ref.path is not None:
        return None
    if checkpoint is not None:
        return find_reference(read_state(checkpoint), checkpoint, warmed_up=config.sft.is_asked)
    return run_dir / FOLDER if config.sft.is_asked else None
