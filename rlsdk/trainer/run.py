"""A whole run, from a checked configuration to the last line: what `rlsdk train` and `rlsdk sft` call."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsdk.config import RunConfig, dump_config
from rlsdk.interfaces import CheckpointError, ConfigError
from rlsdk.kit.atomic import atomic_write_text
from rlsdk.trainer.assemble import Materials, build_materials, rl_stage, sft_stage
from rlsdk.trainer.checkpoint import CheckpointStore, faults
from rlsdk.trainer.loop import Trainer
from rlsdk.trainer.session import (
    RlSession,
    RoleGroup,
    Session,
    model_spec,
    optim_spec,
    roles_of,
    rollout_role,
    sft_optim_spec,
    sharding_manager,
    start_cluster,
    train_role,
)
from rlsdk.trainer.sft import CHECKPOINTS, SftStage

if TYPE_CHECKING:
    from rlsdk.cluster import Cluster
    from rlsdk.registry import Registry
    from rlsdk.trainer.events import RunView
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


class StopFlag:
    """Set by a signal handler; the loop looks at it between steps."""

    def __init__(self) -> None:
        self.is_set = False

    def set(self) -> None:
        self.is_set = True

    def __call__(self) -> bool:
        return self.is_set


def make_run_dir(config: RunConfig) -> Path:
    """The run's folder: `run_dir/run_name`, or one named by date and time that no other run has."""
    parent = Path(config.trainer.run_dir)
    if config.trainer.run_name is not None:
        folder = parent / config.trainer.run_name
        folder.mkdir(parents=True, exist_ok=True)
        return folder.resolve()
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{n}" for n in range(2, 1000))):
        folder = parent / f"{stamp}{suffix}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder.resolve()
    raise ConfigError(f"trainer.run_dir {str(parent)!r} already holds 1000 runs of this second; set trainer.run_name")


def find_checkpoint(config: RunConfig, run_dir: Path, folder: str = "checkpoints") -> Path | None:
    """What the run resumes from: None to start afresh. `folder` is the one in a run that holds its checkpoints.

    Raises:
        CheckpointError: `trainer.resume` names a folder that is neither a whole checkpoint nor a run that has one.
    """
    choice = config.trainer.resume
    if choice == "never":
        return None
    if choice == "auto":
        return CheckpointStore(run_dir / folder, config.trainer.keep_checkpoints).newest()
    named = Path(choice)
    if not faults(named):
        return named
    newest = CheckpointStore(named / folder, config.trainer.keep_checkpoints).newest()
    if newest is None:
        raise CheckpointError(
            f"trainer.resume {choice!r} is neither a whole checkpoint ({faults(named)[0]}) nor a run with one; "
            f"give runs/NAME, runs/NAME/{folder}/step_N, 'auto' or 'never'"
        )
    return newest


def check_resume(config: RunConfig, folder: str = "checkpoints") -> None:
    """Looks for a checkpoint that is named, before the run has a folder.

    Raises:
        ConfigError: as `find_checkpoint`.
    """
    if config.trainer.resume not in ("auto", "never"):
        try:
            find_checkpoint(config, Path(), folder)
        except CheckpointError as error:
            raise ConfigError(str(error)) from None


@contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Keeps a second process from writing into the same run's folder; gone with the process, however it ends."""
    import fcntl

    with (run_dir / ".lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"trainer.run_name: another process is writing to {str(run_dir)!r}; wait for it, or choose another name"
            ) from error
        handle.write(str(os.getpid()))
        handle.flush()
        yield


def run_train(
    config: RunConfig, registry: Registry, view: RunView, *, run_dir: Path, device: str, stop: StopFlag
) -> RunResult:
    """Warm start where asked for, then reinforcement learning; resumes where a checkpoint is found."""
    start = time.perf_counter()
    with run_lock(run_dir):
        atomic_write_text(run_dir / "config.yaml", dump_config(config))
        checkpoint = find_checkpoint(config, run_dir)
        with _prepared(
            config,
            lambda: build_materials(config, registry, run_dir, view),
            lambda: start_cluster(config, registry, roles_of(config), device=device, run_dir=run_dir),
        ) as (materials, cluster):
            session = _rl_session(config, registry, cluster, materials, resuming=checkpoint is not None, stop=stop)
            stage = rl_stage(config, registry, materials, session)
            with closing(stage):
                trainer = _trainer(config, materials, stage, session.actor, stop)
                if checkpoint is not None:
                    trainer.restore(checkpoint)
                    view.notice(f"resumed from {checkpoint} at step {stage.step}")
                trainer.fit()
                return _result(trainer, stage, run_dir, start, stop)


def _result(trainer: Trainer, stage: RlStage, run_dir: Path, start: float, stop: StopFlag) -> RunResult:
    return RunResult(
        run_dir=run_dir,
        steps=stage.step,
        stopped=stop(),
        seconds=time.perf_counter() - start,
        checkpoint=trainer.last_checkpoint,
        first_eval=stage.first_eval or {},
        last_eval=stage.last_eval,
    )


def _trainer(config: RunConfig, materials: Materials, stage: Stage, actor: RoleGroup, stop: StopFlag) -> Trainer:
    return Trainer(
        stage,
        [actor],
        materials.output,
        tokenizer=materials.tokenizer,
        config_text=dump_config(config),
        keep_checkpoints=config.trainer.keep_checkpoints,
        save_timeout_s=config.deadlines.save_s,
        stop=stop,
    )


def _rl_session(
    config: RunConfig, registry: Registry, cluster: Cluster, materials: Materials, *, resuming: bool, stop: StopFlag
) -> RlSession:
    """Starts the roles. The reference policy is the one that RL starts from, so it comes after the warm start."""
    main = optim_spec(config.train.optim, config.trainer.optimizer_steps)
    warm_start = config.sft.steps > 0 and not resuming
    first = sft_optim_spec(config) if warm_start else main
    actor = train_role(config, registry, cluster, "actor", model_spec(config), first)
    reference = materials.output.run_dir / "reference"
    if warm_start:
        _supervise(config, materials, Session(actor=actor, put=cluster.put), stop)
        actor.run("reset_optimizer", main)
    ref = None
    if "ref" in roles_of(config):
        if warm_start:
            export_model(actor, materials.tokenizer, reference)
        path = str(reference) if config.sft.steps > 0 else None
        ref = train_role(config, registry, cluster, "ref", model_spec(config, path), None)
    rollout = rollout_role(config, registry, cluster)
    return RlSession(
        actor=actor,
        put=cluster.put,
        rollout=rollout,
        manager=sharding_manager(config, registry, actor, rollout),
        ref=ref,
    )


def _supervise(config: RunConfig, materials: Materials, session: Session, stop: StopFlag) -> SftStage:
    """Supervised training, gone on with where a checkpoint of it is found."""
    half_way = find_checkpoint(config, materials.output.run_dir, CHECKPOINTS)
    stage = sft_stage(config, materials, session)
    with closing(stage):
        trainer = _trainer(config, materials, stage, session.actor, stop)
        if half_way is not None:
            trainer.restore(half_way)
            materials.output.view.notice(f"supervised training resumed from {half_way} at step {stage.step}")
        trainer.fit()
    return stage


def run_sft(
    config: RunConfig, registry: Registry, view: RunView, *, run_dir: Path, device: str, stop: StopFlag
) -> RunResult:
    """Supervised training alone; leaves a Hugging Face folder `model/` in the run's folder."""
    start = time.perf_counter()
    if config.sft.steps < 1:
        raise ConfigError("sft.steps: 0 trains nothing; give --sft.steps N")
    with run_lock(run_dir):
        atomic_write_text(run_dir / "config.yaml", dump_config(config))
        with _prepared(
            config,
            lambda: build_materials(config, registry, run_dir, view, rewarded=False),
            lambda: start_cluster(config, registry, ["actor"], device=device, run_dir=run_dir),
        ) as (materials, cluster):
            actor = train_role(config, registry, cluster, "actor", model_spec(config), sft_optim_spec(config))
            done = _supervise(config, materials, Session(actor=actor, put=cluster.put), stop)
            export_model(actor, materials.tokenizer, run_dir / "model")
    return RunResult(
        run_dir=run_dir,
        steps=done.step,
        stopped=stop(),
        seconds=time.perf_counter() - start,
        checkpoint=run_dir / "model",
        last_eval=done.last,
    )


def export_model(actor: RoleGroup, tokenizer: Any, folder: Path) -> None:
    """Writes weights, configuration and tokenizer in Hugging Face form; whole or absent."""
    draft = folder.with_name(f".{folder.name}.tmp")
    _clear(draft)
    draft.mkdir(parents=True)
    actor.run("save_pretrained", str(draft))
    tokenizer.save_pretrained(str(draft))
    _clear(folder)
    os.replace(draft, folder)


def _clear(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _prepared(
    config: RunConfig, build: Callable[[], Materials], start: Callable[[], Cluster]
) -> Iterator[tuple[Materials, Cluster]]:
    """Materials and cluster. A cluster of the run's own starts while the others are made, since both take seconds; one
    that others use is asked for devices only when nothing else can fail."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="rlsdk-materials")
    building = pool.submit(build)
    pool.shutdown(wait=False)
    with ExitStack() as stack:
        stack.callback(_close, building)
        if config.placement.ray_address is not None:
            building.result()
        cluster = stack.enter_context(start())
        yield building.result(), cluster


def _close(building: Future[Materials]) -> None:
    """Waits for them, since they cannot be stopped half-way; what failed has nothing to close."""
    if building.exception() is None:
        building.result().close()
