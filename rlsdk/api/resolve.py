"""From settings to a run that was checked: everything that can be refused before a process starts is refused here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.resources import files
from pathlib import Path

from rlsdk.api.limits import check_limits
from rlsdk.api.models import model_fields, other_models
from rlsdk.api.paths import with_absolute_paths
from rlsdk.api.settings import Settings
from rlsdk.config import PairTraining, Role, RunConfig, check_run, config_error, pair_problems, pair_roles, roles
from rlsdk.config.declared import with_declared_roles
from rlsdk.config.role_names import ACTOR
from rlsdk.registry import Registry

QUICKSTART = "quickstart.yaml"


class Training(StrEnum):
    """What is trained, and how. The value is the command's name."""

    RL = "train"
    SFT = "sft"
    REWARD_MODEL = "reward-model"
    DPO = "dpo"

    @property
    def pairs(self) -> PairTraining | None:
        """Of training from pairs."""
        return PairTraining(self.value) if self in (Training.REWARD_MODEL, Training.DPO) else None

    @property
    def checkpoints(self) -> str:
        """Folder of a run that holds what it is resumed from."""
        if self.pairs is not None:
            return self.pairs.checkpoints
        return "checkpoints" if self is Training.RL else "sft_checkpoints"


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A run that was checked against what is installed."""

    training: Training
    config: RunConfig
    registry: Registry
    device: str
    """`cpu` or `cuda`, where the placement leaves it open."""
    makes_model: bool = False
    """The quickstart: its model is made on the spot."""
    notices: Sequence[str] = ()
    """What a person should know of how it was read."""

    @property
    def table(self) -> Sequence[Role]:
        """The roles of the run, each with its pool."""
        from rlsdk.trainer.roles import roles

        config = with_model_path(self.config, "made on the spot") if self.makes_model else self.config
        if (kind := self.training.pairs) is not None:
            return pair_roles(config, kind, roles(config, self.device, needed=kind.role_names))
        return roles(config, self.device, needed=None if self.training is Training.RL else [ACTOR])


def resolve(settings: Settings, training: Training = Training.RL, *, device: str | None = None) -> Resolved:
    """Reads the settings of a run and checks everything that can be checked.

    Args:
        settings: as given.
        training: of which kind.
        device: what `placement.device: auto` comes out as; None: what this machine has.

    Raises:
        ConfigError: lists all that is wrong; or a limit of this shell is too low for any run.
        DataError: a data file is not there.
    """
    check_limits()
    registry = Registry.discover()
    if training is Training.RL:
        return _resolve_rl(settings, registry, device)
    config = with_absolute_paths(settings.load(registry))

    from rlsdk.trainer.data_sources import check_rows, check_sources
    from rlsdk.trainer.roles import resolve_device, role_devices

    device = resolve_device(config.placement)
    model, kind = model_fields(config), training.pairs
    names = kind.role_names if kind is not None else None
    problems = list(pair_problems(config, kind)) if kind is not None else []
    problems += check_run(
        config,
        registry,
        model.get("model_type"),
        device,
        devices=role_devices(config, device, train_only=True, needed=names),
        table=pair_roles(config, kind, roles(config, needed=names)) if kind is not None else None,
        train_only=True,
        model=model,
    )
    if problems:
        raise config_error(problems)
    check_sources(config, registry)
    check_rows(config, registry, holds_out=kind is None)
    return Resolved(training=training, config=config, registry=registry, device=device)


def _resolve_rl(settings: Settings, registry: Registry, device: str | None) -> Resolved:
    quickstart = not settings.names_a_task
    base = [Path(str(files("rlsdk.trainer") / "recipes" / QUICKSTART))] if quickstart else []
    config = with_absolute_paths(with_declared_roles(settings.load(registry, base), registry))

    from rlsdk.trainer.data_sources import check_rows, check_sources
    from rlsdk.trainer.reward_check import inspect_rewards
    from rlsdk.trainer.roles import resolve_device, role_devices

    if device is None or config.placement.device != "auto":
        device = resolve_device(config.placement)
    quickstart = quickstart and config.model.path is None
    checked = with_model_path(config, "made on the spot") if quickstart else config
    model = {"model_type": "llama"} if quickstart else model_fields(config)
    devices = role_devices(config, device)
    kind = model.get("model_type")
    problems = check_run(checked, registry, kind, device, devices=devices, model=model, models=other_models(checked))
    found, notices = inspect_rewards(config.rewards)
    if problems := [*problems, *found]:
        raise config_error(problems)
    check_sources(config, registry)
    check_rows(config, registry, holds_out=True)
    return Resolved(
        training=Training.RL,
        config=config,
        registry=registry,
        device=device,
        makes_model=quickstart,
        notices=notices,
    )


def with_model_path(config: RunConfig, path: str) -> RunConfig:
    return config.model_copy(update={"model": config.model.model_copy(update={"path": path})})
