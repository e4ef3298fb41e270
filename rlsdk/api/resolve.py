"""Turns settings into a prepared run."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from rlsdk.api.limits import check_limits
from rlsdk.api.paths import with_absolute_paths
from rlsdk.api.settings import Settings
from rlsdk.config import RunConfig
from rlsdk.config.checks.declared import with_declared_roles
from rlsdk.config.checks.findings import Findings
from rlsdk.config.checks.training import Training
from rlsdk.config.loading.load import SHIPPED, Loaded
from rlsdk.config.loading.reads import Reader, unread
from rlsdk.registry import Registry

if TYPE_CHECKING:
    from rlsdk.trainer.runs.prepare import PreparedRun

QUICKSTART = "quickstart.yaml"
WARMUP = "train.optim.warmup_steps"


def resolve(
    settings: Settings, training: Training = Training.RL, *, device: str | None = None, loads_models: bool = True
) -> PreparedRun:
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
    config, notices = _read(settings, training, registry, found, quickstart=quickstart)

    from rlsdk.trainer.runs.prepare import prepare

    return prepare(
        config,
        registry,
        training,
        found,
        device=device,
        makes_model=quickstart and config.model.path is None,
        loads_models=loads_models,
        notices=notices,
    )


def _read(
    settings: Settings, training: Training, registry: Registry, found: Findings, *, quickstart: bool
) -> tuple[RunConfig, Sequence[str]]:
    """The configuration with absolute paths, for inspection only if `found` has problems; and a line for each file with
    values that the command does not read."""
    names = [QUICKSTART] if quickstart else [training.reader.recipe] if training.reader.recipe else []
    base = [Path(str(files("rlsdk.trainer") / "recipes" / name)) for name in names]
    loaded = settings.read(registry, training.reader, base)
    if quickstart and loaded.config is not None:
        loaded = _shortened(settings, registry, training.reader, base, loaded)
    read = config = loaded.config
    if read is not None and training is Training.RL:
        config = found.run_check(lambda: with_declared_roles(read, registry), read)
    problems, lines = unread(loaded.given, config, training.reader, loaded.problems, loaded.idle)
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
