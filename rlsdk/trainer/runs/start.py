"""A session of a run: its cluster, its inputs, its roles and its loop; and the result of a run."""

from __future__ import annotations

import functools
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsdk.config import Role, RunConfig, dump_config
from rlsdk.config.checks.training import Training
from rlsdk.interfaces import RlsdkError
from rlsdk.interfaces.spelling import Setting
from rlsdk.kit.files.write_errors import disk_errors
from rlsdk.system import interrupts
from rlsdk.trainer.checkpoints.checkpoint import BestRecord
from rlsdk.trainer.checkpoints.run_folder import ResumePoint, accept_config, choose_resume
from rlsdk.trainer.roles.device_turns import DeviceTurns, shared_pools
from rlsdk.trainer.roles.devices import start_cluster
from rlsdk.trainer.roles.session import Session, limit_controller_threads, start_role, start_roles
from rlsdk.trainer.runs.prepare import PreparedRun
from rlsdk.trainer.runs.restarts import SessionRestarts
from rlsdk.trainer.runs.run_inputs import RunInputs, build_run_inputs
from rlsdk.trainer.stages.export import export_policy
from rlsdk.trainer.stages.loop import Trainer
from rlsdk.trainer.tracking.stopping import StopFlag

if TYPE_CHECKING:
    from rlsdk.cluster import BackgroundCluster, Cluster
    from rlsdk.registry import Registry
    from rlsdk.trainer.roles.role_group import RoleGroup
    from rlsdk.trainer.stages.stage import Stage
    from rlsdk.trainer.tracking.events import RunView


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """Result of a run."""

    config: RunConfig
    """Configuration with which it ran."""
    run_dir: Path
    steps: int
    stopped: bool
    """Whether it ended early because it was asked to."""
    seconds: float
    checkpoint: Path | None = None
    first_eval: Mapping[str, float] = field(default_factory=dict)
    last_eval: Mapping[str, float] = field(default_factory=dict)
    best: BestRecord | None = None
    """The best checkpoint by `checkpoint.best`, and its value."""
    best_checkpoint: Path | None = None
    ended_early: str | None = None
    """Reason why it ended by itself before its last step."""


@dataclass(frozen=True, kw_only=True)
class SessionStart:
    """Inputs of a run's start."""

    run: PreparedRun
    run_dir: Path
    view: RunView
    stop: StopFlag
    restarts: SessionRestarts
    resume: ResumePoint
    """Checkpoint to resume from."""
    ahead: BackgroundCluster | None = None
    """The cluster of the first session, if its start was begun earlier."""

    @classmethod
    def of(
        cls,
        run: PreparedRun,
        view: RunView,
        *,
        run_dir: Path,
        stop: StopFlag,
        resume: ResumePoint | None = None,
        ahead: BackgroundCluster | None = None,
    ) -> SessionStart:
        """The first start of a run in its folder."""
        restarts = SessionRestarts(run.config, run_dir, view, stop)
        resume = resume or ResumePoint()
        return cls(run=run, run_dir=run_dir, view=view, stop=stop, restarts=restarts, resume=resume, ahead=ahead)

    def again(self, config: RunConfig) -> SessionStart:
        """The start of a session after one that was lost, from the newest whole checkpoint."""
        resume = choose_resume(config, self.run_dir, self.run.training.checkpoints, self.view.notice)
        return replace(self.with_config(config), resume=resume)

    def with_config(self, config: RunConfig) -> SessionStart:
        """The same start with other values of the configuration."""
        return replace(self, run=self.run.with_config(config))

    @property
    def config(self) -> RunConfig:
        return self.run.config

    @property
    def registry(self) -> Registry:
        return self.run.registry

    @property
    def table(self) -> Sequence[Role]:
        """Roles to start."""
        return self.run.table

    def accept(self) -> None:
        """Accepts the run: call it once the run can no longer be refused, before it writes anything."""
        accept_config(self.run_dir, self.config, checkpoint=self.resume.checkpoint, notice=self.view.notice)

    def turns(self) -> DeviceTurns:
        """The device turns of these roles' pools."""
        return DeviceTurns(shared=shared_pools(self.run.placement), timeout_s=self.config.deadlines.sync_s)

    def cluster(self) -> Cluster:
        """Waits for the cluster whose start was begun earlier, or starts one."""
        limit_controller_threads()
        with nullcontext() if self.ahead is not None and self.ahead.is_there else self.view.waiting("starting Ray"):
            begun = None if self.ahead is None else self.ahead.take()
            return begun or self._new_cluster()

    def start_role(self, role: Role, cluster: Cluster) -> RoleGroup:
        """Builds the hosts of a role, and reports the wait."""
        with self.view.waiting(f"{role.name}: starting {role.backend}"):
            return start_role(role, self.registry, cluster)

    def start_all(self, cluster: Cluster) -> Session:
        """Starts the hosts of all roles in parallel."""
        turns = self.turns()
        make = functools.partial(self.start_role, cluster=cluster)
        return Session(roles=start_roles(self.table, make, turns, at_once=True), turns=turns, cluster=cluster)

    def _new_cluster(self) -> Cluster:
        return start_cluster(self.table, self.registry, self.config, self.run.placement, run_dir=self.run_dir)


def with_restarts(start: SessionStart, session: Callable[[SessionStart], RunResult]) -> RunResult:
    """Calls `session` until it ends without losing a process; after a loss, with the start that resumes the run."""
    began = time.perf_counter()
    with disk_errors(start.run_dir):
        first = start.config
        result = start.restarts.run(lambda config: session(start if config is first else start.again(config)))
    return replace(result, seconds=time.perf_counter() - began)


@contextmanager
def opened(start: SessionStart, *, rewarded: bool) -> Iterator[tuple[RunInputs, Cluster]]:
    """Yields the inputs and the cluster. The run's own cluster starts while the inputs are built, since both take
    seconds; a shared cluster is asked for devices only once nothing else can fail. `rewarded`: start the grading
    processes."""
    training, checkpoint = start.run.training, start.resume.checkpoint
    pool = ThreadPoolExecutor(1, thread_name_prefix="rlsdk-run-inputs")
    building = pool.submit(
        build_run_inputs,
        start.config,
        start.registry,
        start.run_dir,
        start.view,
        rewarded=rewarded,
        supervised=training.pairs is None and start.resume.within(Training.RL.checkpoints) is None,
        taught=training is Training.DISTILL,
        of_pairs=training.reads_pairs,
        of_steps=training.reads_steps,
        table=start.table,
        resume=checkpoint,
    )
    pool.shutdown(wait=False)
    with ExitStack() as stack:
        stack.push(functools.partial(_close, building))
        if start.config.placement.ray_address is not None:
            building.result()
        cluster = stack.enter_context(start.cluster())
        try:
            with nullcontext() if building.done() else start.view.waiting("reading data"):
                run_inputs = building.result()
            yield run_inputs, cluster
        except RlsdkError as error:
            start.restarts.check(error, cluster)
            raise


def _close(building: Future[RunInputs], kind: type[BaseException] | None, *_: object) -> None:
    """Waits for the inputs, whose building cannot be interrupted, and closes them."""
    interrupts.wait_or_abandon(building, interrupted=interrupts.is_interrupt(kind), then=_close_built)


def _close_built(building: Future[RunInputs]) -> None:
    """Closes inputs that were built; a failed build has nothing to close."""
    if building.exception() is None:
        building.result().close()


def trainer_of(start: SessionStart, run_inputs: RunInputs, stage: Stage, session: Session) -> Trainer:
    """The loop over one stage of the run."""
    start.restarts.has_begun = True
    return Trainer(
        stage,
        session,
        tokenizer=run_inputs.tokenizer,
        config_text=dump_config(start.config),
        keep_checkpoints=start.config.trainer.keep_checkpoints,
        save_timeout_s=start.config.deadlines.save_s,
        stop=start.stop,
        preempted=lambda: start.stop.is_preempted,
        in_background=start.config.checkpoint.background,
    )


def fit(start: SessionStart, trainer: Trainer) -> None:
    """Trains until the stage is finished, or the run is asked to stop."""
    with start.stop.interrupting(trainer.stage.preempt, start.config.faults.preempt_s):
        trainer.fit()


def result_of(start: SessionStart, trainer: Trainer, last: Mapping[str, float], checkpoint: Path | None) -> RunResult:
    """Result of a stage; `with_restarts` adds the seconds.

    Args:
        start: start of the run.
        trainer: trainer of the finished stage.
        last: metrics of the last evaluation.
        checkpoint: the run's result: its last checkpoint, or the folder of its model.
    """
    return RunResult(
        config=start.config,
        run_dir=start.run_dir,
        steps=trainer.stage.step,
        stopped=start.stop(),
        seconds=0.0,
        checkpoint=checkpoint,
        first_eval=trainer.stage.evaluations.first or {},
        last_eval=last,
        best=trainer.best,
        best_checkpoint=trainer.best_checkpoint,
        ended_early=trainer.ended_early,
    )


def resumed_line(checkpoint: Path, step: int, steps: int, *, field: str = "trainer.steps") -> str:
    """Text that says at which step a run continues, or that it is already finished.

    Args:
        checkpoint: of which the run is resumed.
        step: of the checkpoint.
        steps: of the whole run.
        field: says how many those are.
    """
    line = f"resumed from {checkpoint} at step {step}"
    if step < steps:
        return line
    return f"{line}: all {steps} steps were made before, so nothing is trained; `{Setting(field, 2 * step)}` continues"


def train_stage(
    start: SessionStart, run_inputs: RunInputs, stage: Stage, session: Session, *, field: str, said: str = ""
) -> Trainer:
    """Runs a stage to its end, from the run's checkpoint if that is one of this stage. The actor ends with the best
    weights if a metric selects them.

    Args:
        start: start of the run.
        run_inputs: its inputs.
        stage: the stage; closed at the end.
        session: the running roles.
        field: of the configuration, which says how many steps the stage has.
        said: words before those that say where a resumed stage continues.
    """
    with closing(stage):
        trainer = trainer_of(start, run_inputs, stage, session)
        if (checkpoint := start.resume.within(stage.settings.folder)) is not None:
            trainer.restore(checkpoint)
            start.view.notice(f"{said}{resumed_line(checkpoint, stage.step, stage.settings.steps, field=field)}")
        start.accept()
        fit(start, trainer)
        load_best(start, trainer)
    return trainer


def export_final_model(start: SessionStart, trainer: Trainer) -> Path:
    """Writes `model/` in the run's folder, with its card; returns it."""
    folder, timeout_s = start.run_dir / "model", start.config.deadlines.save_s
    export_model(trainer.session, trainer.tokenizer, folder, trainer.card(), timeout_s=timeout_s)
    return folder


def load_best(start: SessionStart, trainer: Trainer) -> None:
    """Loads the best weights into the actor, if a metric selects them."""
    if (best := trainer.load_best()) is not None:
        start.view.notice(f"model/ is that of the best checkpoint: {best.line()}")


def export_model(
    session: Session, tokenizer: Any, folder: Path, card: str | None = None, *, timeout_s: float | None = None
) -> None:
    """Writes weights, configuration and tokenizer of the actor in Hugging Face format, atomically."""
    draft = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(draft, ignore_errors=True)
    export_policy(session, tokenizer, draft, card=card, timeout_s=timeout_s)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(draft, folder)
