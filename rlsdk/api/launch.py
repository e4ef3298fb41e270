"""Executes a checked run: its folder, its engines, its result. Used by commands and the Python API."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlsdk.api.models import check_same_model
from rlsdk.api.resolve import Resolved, Training
from rlsdk.config import RunConfig
from rlsdk.interfaces import ConfigError, RlsdkError, WorkerError

if TYPE_CHECKING:
    from rlsdk.cluster import BackgroundCluster, Cluster
    from rlsdk.trainer.runs.prepare import RunResult
    from rlsdk.trainer.tracking.events import RunView
    from rlsdk.trainer.tracking.stopping import StopFlag


MANIFEST = "manifest.json"
"""File that is in every checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Launched:
    """A finished run."""

    result: RunResult
    config: RunConfig
    """Configuration with which it ran."""


def launch(
    resolved: Resolved,
    view: RunView,
    stop: StopFlag,
    *,
    bring: Callable[[RunConfig, Path], RunConfig] = lambda config, run_dir: config,
) -> Launched:
    """Creates the run's folder and trains.

    Args:
        resolved: the checked run.
        view: shows progress.
        stop: ends the run early, after a step.
        bring: adds further files to the folder; returns the configuration that names them.

    Raises:
        RlsdkError: the run cannot start or continue. A run that did not start leaves no folder, unless a process
            died, whose log is in it.
    """
    from rlsdk.trainer.checkpoints.run_folder import check_resume

    checkpoint = check_resume(resolved.config, resolved.training.checkpoints)
    if checkpoint is not None:
        check_same_model(resolved.config, checkpoint)
    resolved = replace(resolved, config=in_its_own_folder(resolved.config))
    check_devices(resolved)
    with _folder(resolved.config) as run_dir:
        for text in (*resolved.notices, *notes_on_environment(resolved.config)):
            view.notice(text)
        view.notice(f"run {run_dir}")
        with _cluster_ahead(resolved, run_dir, view) as ahead:
            config = _filled(resolved, run_dir, bring)
            return Launched(result=_train(resolved, config, run_dir, view, stop, ahead), config=config)


def check_devices(resolved: Resolved) -> None:
    """Whether this machine has the devices of a run that starts a cluster of its own here.

    Raises:
        PlacementError: it has not; asked against available.
    """
    from rlsdk.cluster.devices.capacity import assign_nodes
    from rlsdk.cluster.ray_cluster.local import this_machine
    from rlsdk.trainer.roles.placement import placement_of

    ray, chosen = sys.modules.get("ray"), resolved.config.placement
    if chosen.ray_address is not None or (ray is not None and ray.is_initialized()):
        return
    placement = placement_of(chosen, [role.name for role in resolved.table], resolved.device)
    assign_nodes(placement, [this_machine(placement)])


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
            f"cluster add --placement.ray_address {address}"
        )


def _filled(resolved: Resolved, run_dir: Path, bring: Callable[[RunConfig, Path], RunConfig]) -> RunConfig:
    """Writes the initial files of a run's folder.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    try:
        config = bring(resolved.config, run_dir)
        if resolved.makes_model:
            from rlsdk.trainer.runs.quickstart import make_model

            config = make_model(config, run_dir)
        return config
    except OSError as error:
        raise ConfigError(
            f"trainer.run_dir: cannot write to {str(run_dir)!r}: {error.strerror or error}; choose another one"
        ) from error


@contextmanager
def _cluster_ahead(resolved: Resolved, run_dir: Path, view: RunView) -> Iterator[BackgroundCluster | None]:
    """Starts the run's own cluster while other modules are imported and data is read. None for a shared cluster, which
    is asked for devices only when nothing else can fail.

    Raises:
        ConfigError: another process is writing into the folder.
    """
    from rlsdk.cluster import BackgroundCluster
    from rlsdk.trainer.checkpoints.run_folder import run_lock
    from rlsdk.trainer.roles.devices import start_cluster

    with run_lock(run_dir):
        config = resolved.config
    if config.placement.ray_address is not None:
        yield None
        return

    def start(before_connect: Callable[[], None]) -> Cluster:
        return start_cluster(
            resolved.table,
            resolved.registry,
            placement=config.placement,
            deadlines=config.deadlines,
            seed=config.trainer.seed,
            device=resolved.device,
            run_dir=run_dir,
            before_connect=before_connect,
        )

    with BackgroundCluster(start) as ahead:
        # The workers' imports take longest, so their processes come first. Until they are started this one imports
        # only what brings no torch along: connecting to Ray looks into torch, and must not find a part of it.
        with view.waiting("starting Ray"):
            import transformers  # noqa: F401

            ahead.wait()
        import torch  # noqa: F401

        yield ahead


def _train(
    resolved: Resolved, config: RunConfig, run_dir: Path, view: RunView, stop: StopFlag, ahead: BackgroundCluster | None
) -> RunResult:
    from rlsdk.trainer.runs.pairs import run_pairs
    from rlsdk.trainer.runs.prepare import Start
    from rlsdk.trainer.runs.rl import run_train
    from rlsdk.trainer.runs.sft import run_sft

    start = Start.of(config, resolved.registry, view, run_dir=run_dir, device=resolved.device, stop=stop, ahead=ahead)
    if (pairs := resolved.training.pairs) is not None:
        return run_pairs(start, pairs)
    return run_train(start) if resolved.training is Training.RL else run_sft(start)


@contextmanager
def _folder(config: RunConfig) -> Iterator[Path]:
    """The run's folder; removed again if it was created for this start and nothing was accepted into it."""
    from rlsdk.trainer.checkpoints.run_folder import HISTORY_FILE, make_run_dir

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
