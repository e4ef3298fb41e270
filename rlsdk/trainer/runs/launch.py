"""Executes a checked run: its folder, its cluster, its sessions, its result. Imports no torch before workers start."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rlsdk.config import RunConfig
from rlsdk.config.checks.training import Training
from rlsdk.interfaces import ConfigError, RlsdkError, WorkerError
from rlsdk.interfaces.spelling import Setting
from rlsdk.kit.model.shapes import is_shape
from rlsdk.system.printable import described
from rlsdk.trainer.checkpoints.checkpoint import MANIFEST
from rlsdk.trainer.checkpoints.run_end import record_end
from rlsdk.trainer.checkpoints.run_folder import HISTORY_FILE, choose_resume, make_run_dir, run_lock
from rlsdk.trainer.inputs.model_config import check_same_model

if TYPE_CHECKING:
    from rlsdk.cluster import BackgroundCluster, Cluster
    from rlsdk.trainer.runs.prepare import PreparedRun
    from rlsdk.trainer.runs.start import RunResult, SessionStart
    from rlsdk.trainer.tracking.events import RunView
    from rlsdk.trainer.tracking.stopping import StopFlag


def launch(
    run: PreparedRun,
    view: RunView,
    stop: StopFlag,
    *,
    stage_files: Callable[[RunConfig, Path], RunConfig] = lambda config, run_dir: config,
) -> RunResult:
    """Creates the run's folder and trains.

    Args:
        run: the checked run.
        view: shows progress.
        stop: ends the run early, after a step.
        stage_files: adds further files to the folder; returns the configuration that names them.

    Raises:
        RlsdkError: the run cannot start or continue. A run that did not start leaves no folder, unless a process
            died, whose log is in it.
    """
    refuse_shapes(run)
    run = run.with_config(in_its_own_folder(run.config))
    with _folder(run.config) as run_dir, run_lock(run_dir):
        resume = choose_resume(run.config, run_dir, run.training.checkpoints, view.notice)
        if resume.checkpoint is not None:
            check_same_model(run.config, resume.checkpoint)
        check_devices(run)
        for text in (*run.notices, *notes_on_environment(run.config)):
            view.notice(text)
        view.notice(f"run {run_dir}")
        with _cluster_ahead(run, run_dir, view) as ahead:
            from rlsdk.trainer.runs.start import SessionStart

            run = run.with_config(_filled(run, run_dir, stage_files))
            start = SessionStart.of(run, view, run_dir=run_dir, stop=stop, resume=resume, ahead=ahead)
            try:
                result = _train(start)
            except BaseException as error:
                record_end(run_dir, "failed", described(error))
                raise
            record_end(run_dir, "stopped" if result.stopped else "finished", result.ended_early or "")
            return result


def refuse_shapes(run: PreparedRun) -> None:
    """Refuses models of which only the shape is given: they have no weights and no tokenizer.

    Raises:
        ConfigError: names the field of the first of them.
    """
    for role in run.table:
        if is_shape(role.model.path):
            raise ConfigError(
                f"{role.fields['path']} {role.model.path!r}: is a shape, without weights or a tokenizer, and for "
                "`rlsdk plan` only; expected a folder, or a name on the hub"
            )


def check_devices(run: PreparedRun) -> None:
    """Whether this machine has the devices of a run that starts a cluster of its own here.

    Raises:
        PlacementError: it has not; asked against available.
    """
    from rlsdk.cluster.devices.capacity import assign_nodes
    from rlsdk.cluster.ray_cluster.local import this_machine

    ray = sys.modules.get("ray")
    if run.config.placement.ray_address is not None or (ray is not None and ray.is_initialized()):
        return
    assign_nodes(run.placement, [this_machine(run.placement)])


def in_its_own_folder(config: RunConfig) -> RunConfig:
    """A run that is resumed by its folder continues in it, unless another name is given; resuming from a checkpoint
    starts a new run."""
    resume, name = Path(config.trainer.resume), config.trainer.run_name
    if not (resume / "config.yaml").is_file() or (resume / MANIFEST).exists() or name not in (None, resume.name):
        return config
    place = resume.resolve()
    trainer = config.trainer.model_copy(update={"run_dir": str(place.parent), "run_name": place.name})
    return config.model_copy(update={"trainer": trainer})


def notes_on_environment(config: RunConfig) -> Iterator[str]:
    """Notices about settings of the environment that have no effect."""
    if (address := os.environ.get("RAY_ADDRESS")) and config.placement.ray_address is None:
        yield (
            f"RAY_ADDRESS={address} is not used: this run starts a Ray of its own on this machine. To join that "
            f"cluster add {Setting('placement.ray_address', address)}"
        )


def _filled(run: PreparedRun, run_dir: Path, stage_files: Callable[[RunConfig, Path], RunConfig]) -> RunConfig:
    """Writes the initial files of a run's folder.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    try:
        config = stage_files(run.config, run_dir)
        if run.makes_model:
            from rlsdk.trainer.runs.quickstart import make_model

            config = make_model(config, run_dir)
        return config
    except OSError as error:
        raise ConfigError(
            f"trainer.run_dir: cannot write to {str(run_dir)!r}: {error.strerror or error}; choose another one"
        ) from error


@contextmanager
def _cluster_ahead(run: PreparedRun, run_dir: Path, view: RunView) -> Iterator[BackgroundCluster | None]:
    """Starts the run's own cluster while other modules are imported and data is read. None for a shared cluster, which
    is asked for devices only when nothing else can fail."""
    from rlsdk.cluster import BackgroundCluster
    from rlsdk.trainer.roles.devices import start_cluster

    config = run.config
    if config.placement.ray_address is not None:
        yield None
        return

    def start(before_connect: Callable[[], None]) -> Cluster:
        table, registry = run.table, run.registry
        return start_cluster(table, registry, config, run.placement, run_dir=run_dir, before_connect=before_connect)

    with BackgroundCluster(start) as ahead:
        # The workers' imports take longest, so their processes come first. Until they are started this one imports
        # only what brings no torch along: connecting to Ray looks into torch, and must not find a part of it.
        with view.waiting("starting Ray"):
            import transformers  # noqa: F401

            ahead.wait()
        import torch  # noqa: F401

        yield ahead


def _train(start: SessionStart) -> RunResult:
    """Trains in sessions, until one of them ends without losing a process."""
    from rlsdk.trainer.runs.rl import say_recipe, train_rl
    from rlsdk.trainer.runs.start import opened, with_restarts
    from rlsdk.trainer.runs.supervised import train_distill, train_pairs, train_sft

    training = start.run.training

    def session(start: SessionStart) -> RunResult:
        with opened(start, rewarded=training is Training.RL) as (run_inputs, cluster):
            start = start.with_config(run_inputs.config)
            if training.pairs is not None:
                return train_pairs(training.pairs, start, run_inputs, cluster)
            alone = {Training.RL: train_rl, Training.SFT: train_sft, Training.DISTILL: train_distill}
            return alone[training](start, run_inputs, cluster)

    if training is Training.RL:
        say_recipe(start)
    return with_restarts(start, session)


@contextmanager
def _folder(config: RunConfig) -> Iterator[Path]:
    """The run's folder; removed again if it was created for this start and nothing was accepted into it."""
    parent, name = Path(config.trainer.run_dir), config.trainer.run_name
    there = [path for path in (parent, parent / (name or "")) if path.exists()]
    run_dir = make_run_dir(config)
    try:
        yield run_dir
    except BaseException as error:
        keeps_log = isinstance(error, WorkerError) or not isinstance(error, RlsdkError | KeyboardInterrupt | SystemExit)
        is_new = run_dir.is_dir() and not any(run_dir.samefile(path) for path in there)
        if is_new and not keeps_log and not (run_dir / HISTORY_FILE).exists():
            shutil.rmtree(run_dir, ignore_errors=True)
            if parent not in there:
                with suppress(OSError):  # other runs were added meanwhile
                    parent.rmdir()
        raise
