"""Generation and evaluation without training: a rollout engine alone, on a checkpoint or a model folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlsdk.config import RunConfig
from rlsdk.interfaces import ConfigError
from rlsdk.trainer.checkpoint import CheckpointStore, faults
from rlsdk.trainer.session import RoleGroup, rollout_role, start_cluster

if TYPE_CHECKING:
    from rlsdk.registry import Registry


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """What a path stands for."""

    model: Path
    """Folder in Hugging Face form."""
    config: Path | None
    """The configuration it was trained with, when it comes from a run."""


def find_model(path: Path) -> ModelSource:
    """Takes a run, a checkpoint or a model folder.

    Raises:
        ConfigError: it is none of these; says what was looked for.
    """
    checkpoint = path if not faults(path) else CheckpointStore(path / "checkpoints", 1).newest()
    if checkpoint is not None:
        if not (checkpoint / "model" / "config.json").is_file():
            raise ConfigError(f"checkpoint {str(checkpoint)!r} has no model/: its train backend cannot export one")
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
    with start_cluster(config, registry, ["rollout"], device=device, run_dir=log_dir) as cluster:
        yield rollout_role(config, registry, cluster, load_weights=True)
