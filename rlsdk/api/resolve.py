"""Turns settings into a checked run: everything that can be refused before a process starts is refused here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import Any

from rlsdk.api.findings import Findings
from rlsdk.api.limits import check_limits
from rlsdk.api.models import file_problems, model_fields, other_models
from rlsdk.api.paths import with_absolute_paths
from rlsdk.api.settings import Settings
from rlsdk.config import PairTraining, Problem, Role, RunConfig, check_run, pair_roles, roles
from rlsdk.config.checks.commands import READERS
from rlsdk.config.checks.declared import with_declared_roles
from rlsdk.config.loading.load import SHIPPED, Loaded
from rlsdk.config.loading.other_names import RATES
from rlsdk.config.loading.reads import Reader, unread
from rlsdk.config.sections.role_names import ACTOR
from rlsdk.registry import Registry

QUICKSTART = "quickstart.yaml"
WARMUP = "train.optim.warmup_steps"


class Training(StrEnum):
    """Kind of training; the value is the name of the command."""

    RL = "train"
    SFT = "sft"
    REWARD_MODEL = "reward-model"
    DPO = "dpo"

    @property
    def pairs(self) -> PairTraining | None:
        """The kind of training from pairs; None otherwise."""
        return PairTraining(self.value) if self in (Training.REWARD_MODEL, Training.DPO) else None

    @property
    def reader(self) -> Reader:
        """What the command reads of a configuration."""
        return READERS[self.value]

    @property
    def checkpoints(self) -> str:
        """Folder of a run with its checkpoints."""
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
    """`cpu` or `cuda`: value of `placement.device: auto`."""
    makes_model: bool = False
    """Whether it is the quickstart, which creates its model."""
    notices: Sequence[str] = ()
    """Notices on how the settings were read."""

    @property
    def table(self) -> Sequence[Role]:
        """The roles of the run, each with its pool."""
        from rlsdk.trainer.roles.placement import roles

        config = with_model_path(self.config, "made on the spot") if self.makes_model else self.config
        if (kind := self.training.pairs) is not None:
            return pair_roles(config, kind, roles(config, self.device, needed=kind.role_names))
        return roles(config, self.device, needed=None if self.training is Training.RL else [ACTOR])


def resolve(
    settings: Settings, training: Training = Training.RL, *, device: str | None = None, loads_models: bool = True
) -> Resolved:
    """Reads the settings of a run and checks everything that can be checked.

    Args:
        settings: of the call.
        training: its kind.
        device: value of `placement.device: auto`; None: what this machine has.
        loads_models: weights and tokenizers must exist, and not only each model's `config.json`.

    Raises:
        ConfigError: lists all problems; or a limit of this shell is too low for any run.
        DataError: a data file is missing.
    """
    check_limits()
    registry, found = Registry.discover(), Findings()
    quickstart = training is Training.RL and not settings.names_a_task
    config, unread_files = _read(settings, training, registry, found, quickstart=quickstart)

    from rlsdk.trainer.learner.watch import rate_notices
    from rlsdk.trainer.roles.placement import resolve_device

    if training is not Training.RL or device is None or config.placement.device != "auto":
        device = resolve_device(config.placement)
    quickstart = quickstart and config.model.path is None
    checked = with_model_path(config, "made on the spot") if quickstart else config
    nothing: Mapping[str, Any] = {}
    model = {"model_type": "llama"} if quickstart else nothing
    if not quickstart and not found.names("model.path"):
        model = found.look(lambda: model_fields(config), nothing)
    if loads_models and not quickstart and model:
        found.add(found.look(lambda: list(file_problems(config, _needed_roles(config, training))), []))
    rates = [path for path in RATES if training.reader.reads(path, config)]
    notices = [*unread_files, *rate_notices(config, rates), *_check_data(config, registry, found, training)]
    if training is Training.RL:
        notices = [*notices, *_check_rl(checked, registry, found, device, model)]
    else:
        _check_supervised(checked, training.pairs, registry, found, device, model)
    if found:
        found.refuse()
    return Resolved(
        training=training, config=config, registry=registry, device=device, makes_model=quickstart, notices=notices
    )


def _needed_roles(config: RunConfig, training: Training) -> Sequence[Role]:
    """The roles of this kind of training, not placed yet."""
    if (kind := training.pairs) is not None:
        return pair_roles(config, kind, roles(config, needed=kind.role_names))
    return roles(config, needed=None if training is Training.RL else [ACTOR])


def _read(
    settings: Settings, training: Training, registry: Registry, found: Findings, *, quickstart: bool
) -> tuple[RunConfig, Sequence[str]]:
    """The configuration with absolute paths, for inspection only if `found` has problems; and a line for each file with
    values that the command does not read."""
    base = [Path(str(files("rlsdk.trainer") / "recipes" / QUICKSTART))] if quickstart else []
    loaded = settings.read(registry, training.reader, base)
    if quickstart and loaded.config is not None:
        loaded = _shortened(settings, registry, training.reader, base, loaded)
    read = config = loaded.config
    if read is not None and training is Training.RL:
        config = found.look(lambda: with_declared_roles(read, registry), read)
    problems, lines = unread(loaded.given, config, training.reader, loaded.problems)
    found.add(problems)
    if config is None:
        found.refuse()
    return with_absolute_paths(config), lines


def _shortened(settings: Settings, registry: Registry, reader: Reader, base: Sequence[Path], loaded: Loaded) -> Loaded:
    """Shortens the quickstart's learning-rate warm-up for a run with fewer steps."""
    config = loaded.config
    if config is None or not any(p.path == WARMUP and p.origin.startswith(SHIPPED) for p in loaded.problems):
        return loaded
    return settings.given(WARMUP, config.trainer.optimizer_steps // 10).read(registry, reader, base)


def _check_data(config: RunConfig, registry: Registry, found: Findings, training: Training) -> Sequence[str]:
    """Checks data; returns notices on the rows."""
    from rlsdk.trainer.inputs.sources import check_rows, source_checks

    if found.names("data.train"):
        return ()
    are_there = [found.look(check, False) for check in source_checks(config, registry)]
    if not all(are_there):
        return ()
    kinds = {"of_pairs": training.pairs is not None, "rewarded": training is Training.RL}
    return found.look(lambda: check_rows(config, registry, **kinds, learned=training is Training.SFT), ())


def _check_rl(
    config: RunConfig, registry: Registry, found: Findings, device: str, model: Mapping[str, Any]
) -> Sequence[str]:
    """Checks rewards and algorithm; returns notices."""
    from rlsdk.trainer.inputs.reward_preflight import inspect_rewards
    from rlsdk.trainer.roles.placement import role_devices

    devices = None if found.names("placement") else found.look(lambda: role_devices(config, device), None)
    nothing: Mapping[str, Mapping[str, Any]] = {}
    models = found.look(lambda: other_models(config), nothing)
    kind = model.get("model_type")
    found.add(
        found.look(lambda: check_run(config, registry, kind, device, devices=devices, model=model, models=models), [])
    )
    problems, notices = inspect_rewards(config.rewards)
    found.add(problems)
    return notices


def _check_supervised(
    config: RunConfig,
    kind: PairTraining | None,
    registry: Registry,
    found: Findings,
    device: str,
    model: Mapping[str, Any],
) -> None:
    from rlsdk.trainer.roles.placement import role_devices

    names = kind.role_names if kind is not None else None
    if kind is None and not config.sft.is_asked:
        found.add([Problem("sft.steps", "0: trains nothing; give --sft.steps N or --sft.epochs N")])
    devices = None
    if not found.names("placement"):
        devices = found.look(lambda: role_devices(config, device, train_only=True, needed=names), None)

    def problems() -> list[Problem]:
        return check_run(
            config,
            registry,
            model.get("model_type"),
            device,
            devices=devices,
            table=pair_roles(config, kind, roles(config, needed=names)) if kind is not None else None,
            train_only=True,
            model=model,
        )

    found.add(found.look(problems, []))


def with_model_path(config: RunConfig, path: str) -> RunConfig:
    return config.model_copy(update={"model": config.model.model_copy(update={"path": path})})
