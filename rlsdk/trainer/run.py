"""A whole run, from a checked configuration to the last line: what `rlsdk train` and `rlsdk sft` call."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsdk.config import Role, RunConfig, dump_config, needed_roles, role_of, sft_optim_spec
from rlsdk.config.role_names import ACTOR, REF
from rlsdk.interfaces import CheckpointError, ConfigError
from rlsdk.kit.atomic import atomic_write_text
from rlsdk.trainer.checkpoint import CheckpointStore, faults, read_state
from rlsdk.trainer.groups import RoleGroup
from rlsdk.trainer.parts import RunParts, build_parts
from rlsdk.trainer.reference import FOLDER, find_reference
from rlsdk.trainer.roles import placement_of, roles
from rlsdk.trainer.session import Session, sharding_manager, start_cluster, start_role, start_roles
from rlsdk.trainer.sft import CHECKPOINTS, train_supervised
from rlsdk.trainer.turns import DeviceTurns, shared_pools

if TYPE_CHECKING:
    from rlsdk.cluster import Cluster
    from rlsdk.registry import Registry
    from rlsdk.trainer.events import RunView
    from rlsdk.trainer.loop import Trainer


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
    from rlsdk.trainer.loop import Trainer

    start = time.perf_counter()
    with run_lock(run_dir):
        atomic_write_text(run_dir / "config.yaml", dump_config(config))
        checkpoint = find_checkpoint(config, run_dir)
        table = roles(config, device)
        with _prepared(
            config,
            lambda: build_parts(config, registry, run_dir, view),
            lambda: _start(config, registry, table, device, run_dir),
        ) as (parts, cluster):
            turns = make_turns(config, table, device)
            session = _rl_session(config, registry, cluster, table, turns, parts, view, checkpoint, stop)
            trainer = Trainer(session, config, parts, view, stop)
            if checkpoint is not None:
                trainer.restore(checkpoint)
                view.notice(f"resumed from {checkpoint} at step {trainer.state.step}")
            trainer.fit()
            return _result(trainer, run_dir, start, stop)


def _result(trainer: Trainer, run_dir: Path, start: float, stop: StopFlag) -> RunResult:
    return RunResult(
        run_dir=run_dir,
        steps=trainer.state.step,
        stopped=stop(),
        seconds=time.perf_counter() - start,
        checkpoint=trainer.last_checkpoint,
        first_eval=trainer.first_eval or {},
        last_eval=trainer.last_eval,
    )


def make_turns(config: RunConfig, table: Sequence[Role], device: str) -> DeviceTurns:
    """Whose turn it is in the pools of these roles."""
    placement = placement_of(config.placement, [role.name for role in table], device)
    return DeviceTurns(shared=shared_pools(placement), timeout_s=config.trainer.timeout_s)


def _start(config: RunConfig, registry: Registry, table: Sequence[Role], device: str, run_dir: Path) -> Cluster:
    return start_cluster(
        table, registry, placement=config.placement, trainer=config.trainer, device=device, run_dir=run_dir
    )


def _rl_session(
    config: RunConfig,
    registry: Registry,
    cluster: Cluster,
    table: Sequence[Role],
    turns: DeviceTurns,
    parts: RunParts,
    view: RunView,
    checkpoint: Path | None,
    stop: StopFlag,
) -> Session:
    """Starts the roles. The reference policy is the one that RL starts from, so it comes after the warm start."""
    start = functools.partial(start_role, registry=registry, cluster=cluster)
    actor, rest = role_of(table, ACTOR), [role for role in table if role.name != ACTOR]
    if config.sft.steps > 0 and checkpoint is None:
        groups = start_roles([actor.with_optim(sft_optim_spec(config))], start, turns)
        half_way = find_checkpoint(config, parts.run_dir, CHECKPOINTS)
        train_supervised(
            Session(roles=groups, turns=turns, cluster=cluster), config, parts, view, resume=half_way, stop=stop
        )
        with turns.using(ACTOR, training=True):
            groups[ACTOR].run("reset_optimizer", actor.optim)
            if any(role.name == REF for role in rest):
                export_model(groups[ACTOR], parts.tokenizer, parts.run_dir / FOLDER)
    else:
        groups = start_roles([actor], start, turns)
    reference = reference_of(config, parts.run_dir, checkpoint)
    if reference is not None:
        rest = [role.with_model(str(reference)) if role.name == REF else role for role in rest]
    groups |= start_roles(rest, start, turns)
    session = Session(roles={role.name: groups[role.name] for role in table}, turns=turns, cluster=cluster)
    manager = sharding_manager(
        config.sharding, registry, session.actor, session.rollout, timeout_s=config.trainer.timeout_s
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
        return find_reference(read_state(checkpoint), checkpoint, warmed_up=config.sft.steps > 0)
    return run_dir / FOLDER if config.sft.steps > 0 else None


def run_sft(
    config: RunConfig, registry: Registry, view: RunView, *, run_dir: Path, device: str, stop: StopFlag
) -> RunResult:
    """Supervised training alone; leaves a Hugging Face folder `model/` in the run's folder."""
    start = time.perf_counter()
    if config.sft.steps < 1:
        raise ConfigError("sft.steps: 0 trains nothing; give --sft.steps N")
    with run_lock(run_dir):
        atomic_write_text(run_dir / "config.yaml", dump_config(config))
        half_way = find_checkpoint(config, run_dir, CHECKPOINTS)
        table = [role.with_optim(sft_optim_spec(config)) for role in roles(config, device, needed=[ACTOR])]
        with _prepared(
            config,
            lambda: build_parts(config, registry, run_dir, view, rewarded=False),
            lambda: _start(config, registry, table, device, run_dir),
        ) as (parts, cluster):
            turns = make_turns(config, table, device)
            groups = start_roles(table, functools.partial(start_role, registry=registry, cluster=cluster), turns)
            session = Session(roles=groups, turns=turns, cluster=cluster)
            done = train_supervised(session, config, parts, view, resume=half_way, stop=stop)
            export_model(session.actor, parts.tokenizer, run_dir / "model")
    seconds = time.perf_counter() - start
    return RunResult(
        run_dir=run_dir, steps=done.steps, stopped=stop(), seconds=seconds, checkpoint=run_dir / "model",
        last_eval=done.metrics,
    )  # fmt: skip


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
    config: RunConfig, build: Callable[[], RunParts], start: Callable[[], Cluster]
) -> Iterator[tuple[RunParts, Cluster]]:
    """Parts and cluster. A cluster of the run's own starts while the parts are built, since both take seconds; one
    that others use is asked for devices only when nothing else can fail."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="rlsdk-parts")
    building = pool.submit(build)
    pool.shutdown(wait=False)
    with ExitStack() as stack:
        stack.callback(_close_parts, building)
        if config.placement.ray_address is not None:
            building.result()
        cluster = stack.enter_context(start())
        yield building.result(), cluster


def _close_parts(building: Future[RunParts]) -> None:
    """Waits for them, since they cannot be stopped half-way; what failed has nothing to close."""
    if building.exception() is None:
        building.result().close()
