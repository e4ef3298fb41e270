"""Generation and evaluation without training: a rollout engine alone, on a checkpoint or a model folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlsdk.config import RunConfig
from rlsdk.config.role_names import ROLLOUT
from rlsdk.interfaces import CheckpointError, ConfigError
from rlsdk.trainer.checkpoint import CheckpointStore, damage, faults, older_whole
from rlsdk.trainer.groups import RoleGroup
from rlsdk.trainer.roles import roles
from rlsdk.trainer.run_folder import Notice, silent
from rlsdk.trainer.session import start_cluster, start_role

if TYPE_CHECKING:
    from rlsdk.registry import Registry


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """What a path stands for."""

    model: Path
    """Folder in Hugging Face form."""
    config: Path | None
    """The configuration it was trained with, when it comes from a run."""


def find_model(path: Path, notice: Notice = silent) -> ModelSource:
    """Takes a run, a checkpoint or a model folder.

    Args:
        path: of one of these.
        notice: receives a line for each damaged checkpoint of a run that is skipped.

    Raises:
        ConfigError: it is none of these, or damaged; says what was looked for.
    """
    try:
        store = CheckpointStore(path / "checkpoints", 1)
        checkpoint = path if not faults(path) else store.newest_intact(notice, "model")
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    if checkpoint is not None:
        if not (checkpoint / "model" / "config.json").is_file():
            raise ConfigError(f"checkpoint {str(checkpoint)!r} has no model/: its train backend cannot export one")
        if problems := damage(checkpoint, "model"):
            raise ConfigError(
                f"checkpoint {str(checkpoint)!r} is damaged: {'; '.join(problems[:3])}{older_whole(checkpoint)}"
            )
        return ModelSource(model=checkpoint / "model", config=checkpoint / "config.yaml")
    if (path / "config.json").is_file():
        return ModelSource(model=path, config=None)
    raise ConfigError(
        f"{str(path)!r} is no run (checkpoints/step_N), no whole checkpoint ({faults(path)[0]}) and no model folder "
        "(config.json); give one of the three"
    )


@contextmanager
def open_rollout(config: RunConfig, registry: Registry, *, device: str, log_dir: Path) -> Iterator[RoleGroup]:
    """A rollout backend that serves the model of `config`, for as long as the context lives."""
    (role,) = roles(config, device, needed=[ROLLOUT])
    role = role.loading_weights()
    with start_cluster(
        [role],
        registry,
        placement=config.placement,
        deadlines=config.deadlines,
        seed=config.trainer.seed,
        device=device,
        run_dir=log_dir,
    ) as cluster:
        yield start_role(role, registry, cluster)
