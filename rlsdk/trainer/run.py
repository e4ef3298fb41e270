"""A whole run, from a checked configuration to the last line: what `rlsdk train` and `rlsdk sft` call."""

from __future__ import annotations

import functools
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsdk.config import Role, RunConfig, dump_config, needed_roles, role_of, sft_optim_spec, with_dtype
from rlsdk.config.role_names import ACTOR, REF
from rlsdk.interfaces import ConfigError, RlsdkError
from rlsdk.trainer.assemble import rl_stage
from rlsdk.trainer.checkpoint import BestRecord, read_state
from rlsdk.trainer.devices import start_cluster
from rlsdk.trainer.lives import Lives
from rlsdk.trainer.loop import Trainer, export_policy
from rlsdk.trainer.materials import Materials, build_materials
from rlsdk.trainer.reference import FOLDER, find_reference
from rlsdk.trainer.roles import placement_of, roles
from rlsdk.trainer.run_folder import accept_config, find_checkpoint, run_lock
from rlsdk.trainer.session import (
    Session,
    leave_processors_to_workers,
    sharding_manager,
    start_role,
    start_roles,
)
from rlsdk.trainer.sft import CHECKPOINTS, SftStage
from rlsdk.trainer.stopping import StopFlag
from rlsdk.trainer.supervised import sft_stage
from rlsdk.trainer.turns import DeviceTurns, shared_pools

if TYPE_CHECKING:
    from rlsdk.cluster import Cluster, ClusterAhead
    from rlsdk.registry import Registry
    from rlsdk.trainer.events import RunView
    from rlsdk.trainer.groups import RoleGroup
    from rlsdk.trainer.rl import RlStage
    from rlsdk.trainer.stage import Stage


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run came to."""

    run_dir: Path
    steps: int
    stopped: bool
    """Ended early because it was asked to."""
    seconds: float
    checkpoint: Path | None = None
    first_eval: Mapping[str, float] = field(default_factory=dict)
    last_eval: Mapping[str, float] = field(default_factory=dict)
    best: BestRecord | None = None
    """The best checkpoint by `checkpoint.best`, and its value."""
    best_checkpoint: Path | None = None
    ended_early: str | None = None
    """Why it ended before its last step by itself, in words."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a run starts with."""

    config: RunConfig
    registry: Registry
    run_dir: Path
    device: str
    """`cpu` or `cuda`, where the placement leaves it open."""
    table: Sequence[Role]
    view: RunView
    stop: StopFlag
    lives: Lives
    checkpoint: Path | None = None
    """Of reinforcement learning, to go on from."""
    half_way: Path | None = None
    """Of supervised training, to go on from."""
    ahead: ClusterAhead | None = None
    """The cluster of the first session, where it was begun before."""

    def accept(self) -> None:
        """Nothing can refuse the run any more, and nothing of it was written yet."""
        accept_config(self.run_dir, self.config, checkpoint=self.resume, notice=self.view.notice)

    @property
    def resume(self) -> Path | None:
        return self.checkpoint or self.half_way

    def turns(self) -> DeviceTurns:
        """Whose turn it is in the pools of these roles."""
        placement = placement_of(self.config.placement, [role.name for role in self.table], self.device)
        return DeviceTurns(shared=shared_pools(placement), timeout_s=self.config.deadlines.sync_s)

    def cluster(self) -> Cluster:
        """Waits for the one that was begun before, or starts one."""
        leave_processors_to_workers()
        with nullcontext() if self.ahead is not None and self.ahead.is_there else self.view.waiting("starting Ray"):
            begun = None if self.ahead is None else self.ahead.take()
            return begun or self._new_cluster()

    def start_role(self, role: Role, cluster: Cluster) -> RoleGroup:
        """Builds the hosts of a role, and says so meanwhile."""
        with self.view.waiting(f"{role.name}: starting {role.backend}"):
            return start_role(role, self.registry, cluster)

    def _new_cluster(self) -> Cluster:
        return start_cluster(
            self.table,
            self.registry,
            placement=self.config.placement,
            deadlines=self.config.deadlines,
            seed=self.config.trainer.seed,
            device=self.device,
            run_dir=self.run_dir,
        )


def run_train(
    config: RunConfig,
    registry: Registry,
    view: RunView,
    *,
    run_dir: Path,
    device: str,
    stop: StopFlag,
    ahead: ClusterAhead | None = None,
) -> RunResult:
    """Warm start where asked for, then reinforcement learning; resumes where a checkpoint is found. `ahead`: the
    cluster, where it was begun before."""
    began = time.perf_counter()
    config = with_dtype(config, device)
    view.notice(f"dtype {config.model.dtype} on {device}, float32 weights in the optimizer")
    if (recipe := config.algorithm.recipe) is not None:
        view.notice(f"algorithm {recipe}: {config.algorithm.advantage}, {config.algorithm.loss}")
    with run_lock(run_dir):
        lives = Lives(config, run_dir, view, stop)
        result = lives.run(
            lambda config: _train(
                Start(
                    config=config,
                    registry=registry,
                    run_dir=run_dir,
                    device=device,
                    table=roles(config, device),
                    view=view,
                    stop=stop,
                    lives=lives,
                    ahead=ahead,
                )
            )
        )
    return replace(result, seconds=time.perf_counter() - began)


def _train(start: Start) -> RunResult:
    """One session of a run, from where `trainer.resume` says."""
    config, view = start.config, start.view
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
                view.notice(f"resumed from {checkpoint} at step {stage.step}")
            fit(start, trainer)
            return _result(trainer, stage, start)


def _result(trainer: Trainer, stage: RlStage, start: Start) -> RunResult:
    return RunResult(
        run_dir=start.run_dir,
        steps=stage.step,
        stopped=start.stop(),
        seconds=0.0,
        checkpoint=trainer.last_checkpoint,
        first_eval=stage.evaluations.first or {},
        last_eval=stage.evaluations.last,
        best=trainer.best,
        best_checkpoint=trainer.best_checkpoint,
        ended_early=trainer.ended_early,
    )


def trainer_of(start: Start, materials: Materials, stage: Stage, session: Session) -> Trainer:
    """The loop over one stage of the run."""
    start.lives.has_begun = True
    return Trainer(
        stage,
        session,
        tokenizer=materials.tokenizer,
        config_text=dump_config(start.config),
        keep_checkpoints=start.config.trainer.keep_checkpoints,
        save_timeout_s=start.config.deadlines.save_s,
        stop=start.stop,
        preempted=lambda: start.stop.is_preempted,
        in_background=start.config.checkpoint.background,
    )


def fit(start: Start, trainer: Trainer) -> None:
    """Trains until the stage is over, or the run is asked to stop."""
    with start.stop.interrupting(trainer.stage.preempt, start.config.faults.preempt_s):
        trainer.fit()


def _rl_session(start: Start, cluster: Cluster, materials: Materials) -> Session:
    """Starts the roles. The reference policy is the one that RL starts from, so it comes after the warm start."""
    config, turns = start.config, start.turns()
    make = functools.partial(start.start_role, cluster=cluster)
    actor, rest = role_of(start.table, ACTOR), [role for role in start.table if role.name != ACTOR]
    if config.sft.is_asked and start.checkpoint is None:
        groups = start_roles([actor.with_optim(sft_optim_spec(config))], make, turns)
        session = Session(roles=groups, turns=turns, cluster=cluster)
        _supervise(start, materials, session)
        with turns.using(ACTOR, training=True):
            groups[ACTOR].run("reset_optimizer", actor.optim, timeout_s=config.deadlines.update_s)
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


def _supervise(
    start: Start, materials: Materials, session: Session, *, measured: bool = False
) -> tuple[SftStage, Trainer]:
    """Supervised training, gone on with where a checkpoint of it was found; leaves the actor with the best weights,
    where `measured` and a metric says which they are."""
    stage = sft_stage(start.config, materials, session, measured=measured)
    with closing(stage):
        trainer = trainer_of(start, materials, stage, session)
        if start.half_way is not None:
            trainer.restore(start.half_way)
            start.view.notice(f"supervised training resumed from {start.half_way} at step {stage.step}")
        start.accept()
        fit(start, trainer)
        if (best := trainer.load_best()) is not None:
            start.view.notice(f"model/ is that of the best checkpoint: {best.line()}")
    return stage, trainer


def run_sft(
    config: RunConfig,
    registry: Registry,
    view: RunView,
    *,
    run_dir: Path,
    device: str,
    stop: StopFlag,
    ahead: ClusterAhead | None = None,
) -> RunResult:
    """Supervised training alone; leaves a Hugging Face folder `model/` in the run's folder."""
    began = time.perf_counter()
    config = with_dtype(config, device)
    if not config.sft.is_asked:
        raise ConfigError("sft.steps: 0 trains nothing; give --sft.steps N or --sft.epochs N")
    with run_lock(run_dir):
        lives = Lives(config, run_dir, view, stop)
        result = lives.run(
            lambda config: _train_supervised(
                Start(
                    config=config,
                    registry=registry,
                    run_dir=run_dir,
                    device=device,
                    table=_sft_table(config, device),
                    half_way=find_checkpoint(config, run_dir, CHECKPOINTS, view.notice),
                    view=view,
                    stop=stop,
                    lives=lives,
                    ahead=ahead,
                )
            )
        )
    return replace(result, seconds=time.perf_counter() - began)


def _train_supervised(start: Start) -> RunResult:
    """One session of supervised training."""
    with prepared(start, rewarded=False) as (materials, cluster):
        start = replace(start, config=materials.config, table=_sft_table(materials.config, start.device))
        turns = start.turns()
        make = functools.partial(start.start_role, cluster=cluster)
        session = Session(roles=start_roles(start.table, make, turns, at_once=True), turns=turns, cluster=cluster)
        done, trainer = _supervise(start, materials, session, measured=True)
        export_model(
            session,
            materials.tokenizer,
            start.run_dir / "model",
            trainer.card(),
            timeout_s=start.config.deadlines.save_s,
        )
    return RunResult(
        run_dir=start.run_dir,
        steps=done.step,
        stopped=start.stop(),
        seconds=0.0,
        checkpoint=start.run_dir / "model",
        first_eval=done.evaluations.first or {},
        last_eval={**done.last, **done.evaluations.last},
        best=trainer.best,
        best_checkpoint=trainer.best_checkpoint,
        ended_early=trainer.ended_early,
    )


def _sft_table(config: RunConfig, device: str) -> list[Role]:
    """The actor, with the optimizer of supervised training."""
    return [role.with_optim(sft_optim_spec(config)) for role in roles(config, device, needed=[ACTOR])]


def export_model(
    session: Session, tokenizer: Any, folder: Path, card: str | None = None, *, timeout_s: float | None = None
) -> None:
    """Writes weights, configuration and tokenizer of the actor in Hugging Face form; whole or absent."""
    draft = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(draft, ignore_errors=True)
    export_policy(session, tokenizer, draft, card=card, timeout_s=timeout_s)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(draft, folder)


@contextmanager
def prepared(start: Start, *, rewarded: bool = True, supervised: bool = True) -> Iterator[tuple[Materials, Cluster]]:
    """Materials and cluster. A cluster of the run's own starts while the others are made, since both take seconds; one
    that others use is asked for devices only when nothing else can fail."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="rlsdk-materials")
    building = pool.submit(
        build_materials,
        start.config,
        start.registry,
        start.run_dir,
        start.view,
        rewarded=rewarded,
        supervised=supervised,
        resume=start.resume,
    )
    pool.shutdown(wait=False)
    with ExitStack() as stack:
        stack.callback(_close, building)
        if start.config.placement.ray_address is not None:
            building.result()
        cluster = stack.enter_context(start.cluster())
        try:
            with nullcontext() if building.done() else start.view.waiting("reading data"):
                materials = building.result()
            yield materials, cluster
        except RlsdkError as error:
            start.lives.check(error, cluster)
            raise


def _close(building: Future[Materials]) -> None:
    """Waits for them, since they cannot be stopped half-way; what failed has nothing to close."""
    if building.exception() is None:
        building.result().close()
