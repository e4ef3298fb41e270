"""A whole run, from a checked configuration to the last line: what `rlsdk train` and `rlsdk sft` call."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsdk.config import RunConfig
from rlsdk.interfaces import ConfigError
from rlsdk.trainer.parts import RunParts, build_parts
from rlsdk.trainer.run_folder import accept_config, find_checkpoint, run_lock
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
from rlsdk.trainer.sft import CHECKPOINTS, train_supervised

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


def run_train(
    config: RunConfig, registry: Registry, view: RunView, *, run_dir: Path, device: str, stop: StopFlag
) -> RunResult:
    """Warm start where asked for, then reinforcement learning; resumes where a checkpoint is found."""
    from rlsdk.trainer.loop import Trainer

    start = time.perf_counter()
    with run_lock(run_dir):
        checkpoint = find_checkpoint(config, run_dir, notice=view.notice)
        half_way = None
        if checkpoint is None and config.sft.steps > 0:
            half_way = find_checkpoint(config, run_dir, CHECKPOINTS, view.notice)
        resume = checkpoint or half_way
        with _prepared(
            config,
            lambda: build_parts(config, registry, run_dir, view, resume=resume),
            lambda: start_cluster(config, registry, roles_of(config), device=device, run_dir=run_dir),
        ) as (parts, cluster):

            def accept() -> None:
                accept_config(run_dir, config, checkpoint=resume, notice=view.notice)

            start_rl = functools.partial(_rl_session, parts.config, registry, cluster, parts, view, stop=stop)
            session = start_rl(resuming=checkpoint is not None, half_way=half_way, accept=accept)
            trainer = Trainer(session, parts, view, stop)
            if checkpoint is not None:
                trainer.restore(checkpoint)
            if checkpoint is not None or config.sft.steps == 0:
                accept()
            if checkpoint is not None:
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


def _rl_session(
    config: RunConfig,
    registry: Registry,
    cluster: Cluster,
    parts: RunParts,
    view: RunView,
    *,
    resuming: bool,
    half_way: Path | None,
    stop: StopFlag,
    accept: Callable[[], None],
) -> RlSession:
    """Starts the roles. The reference policy is the one that RL starts from, so it comes after the warm start.

    `accept` is called before a warm start writes anything."""
    main = optim_spec(config.train.optim, config.trainer.optimizer_steps)
    warm_start = config.sft.steps > 0 and not resuming
    first = sft_optim_spec(config) if warm_start else main
    actor = train_role(config, registry, cluster, "actor", model_spec(config), first)
    reference = parts.run_dir / "reference"
    if warm_start:
        session = Session(config=config, cluster=cluster, actor=actor)
        train_supervised(session, parts, view, resume=half_way, stop=stop, accept=accept)
        actor.run("reset_optimizer", main)
    ref = None
    if "ref" in roles_of(config):
        if warm_start:
            export_model(actor, parts.tokenizer, reference)
        path = str(reference) if config.sft.steps > 0 else None
        ref = train_role(config, registry, cluster, "ref", model_spec(config, path), None)
    rollout = rollout_role(config, registry, cluster)
    return RlSession(
        config=config,
        cluster=cluster,
        actor=actor,
        rollout=rollout,
        manager=sharding_manager(config, registry, actor, rollout),
        ref=ref,
    )


def run_sft(
    config: RunConfig, registry: Registry, view: RunView, *, run_dir: Path, device: str, stop: StopFlag
) -> RunResult:
    """Supervised training alone; leaves a Hugging Face folder `model/` in the run's folder."""
    start = time.perf_counter()
    if config.sft.steps < 1:
        raise ConfigError("sft.steps: 0 trains nothing; give --sft.steps N")
    with run_lock(run_dir):
        half_way = find_checkpoint(config, run_dir, CHECKPOINTS, view.notice)
        with _prepared(
            config,
            lambda: build_parts(config, registry, run_dir, view, rewarded=False, resume=half_way),
            lambda: start_cluster(config, registry, ["actor"], device=device, run_dir=run_dir),
        ) as (parts, cluster):
            actor = train_role(config, registry, cluster, "actor", model_spec(config), sft_optim_spec(config))
            session = Session(config=config, cluster=cluster, actor=actor)
            accept = functools.partial(accept_config, run_dir, config, checkpoint=half_way, notice=view.notice)
            done = train_supervised(session, parts, view, resume=half_way, stop=stop, accept=accept)
            export_model(actor, parts.tokenizer, run_dir / "model")
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
