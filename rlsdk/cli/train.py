"""`rlsdk train`: reinforcement learning from one command; without arguments, the quickstart."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsdk.cli.console import ConsoleView
from rlsdk.cli.figures import gains
from rlsdk.cli.signals import stop_on_signal
from rlsdk.cli.terminal import SafeConsole
from rlsdk.config import RunConfig, check_run, config_error, load_config, roles
from rlsdk.config.declared import with_declared_roles
from rlsdk.config.trust import TRUST_FLAG, code_in
from rlsdk.interfaces import ConfigError
from rlsdk.registry import Registry

if TYPE_CHECKING:
    from rlsdk.trainer.run import RunResult

QUICKSTART = "quickstart.yaml"
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A run that was checked against what is installed."""

    config: RunConfig
    registry: Registry
    device: str
    """`cpu` or `cuda`, where the placement leaves it open."""
    makes_model: bool
    """The quickstart: its model is made on the spot."""


def resolve(args: Sequence[str], device: str | None = None) -> Resolved:
    """Reads the arguments of `rlsdk train` and checks everything that can be checked.

    Args:
        args: as typed.
        device: what `placement.device: auto` comes out as; None: what this machine has.

    Raises:
        ConfigError: lists all that is wrong.
    """
    registry = Registry.discover()
    quickstart = not names_a_task(args)
    recipe = [Path(str(files("rlsdk.trainer") / "recipes" / QUICKSTART))] if quickstart else []
    config = with_declared_roles(load_config(recipe, list(args), registry), registry)

    from rlsdk.trainer.roles import resolve_device, role_devices
    from rlsdk.trainer.run_data import check_sources

    if device is None or config.placement.device != "auto":
        device = resolve_device(config.placement)
    quickstart = quickstart and config.model.path is None
    checked = with_model_path(config, "made on the spot") if quickstart else config
    model = {"model_type": "llama"} if quickstart else model_fields(config)
    devices = role_devices(config, device)
    models = {
        role.name: fields_of(role.model.path, role.model.revision, role.fields["path"])
        for role in roles(checked)
        if role.model.path != (checked.model.path or "")
    }
    kind = model.get("model_type")
    if problems := check_run(checked, registry, kind, device, devices=devices, model=model, models=models):
        raise config_error(problems)
    check_sources(config, registry)
    return Resolved(config=config, registry=registry, device=device, makes_model=quickstart)


def run(args: Sequence[str]) -> None:
    """Checks everything that can be checked, then trains."""
    resolved = resolve(args)
    config, registry, device = resolved.config, resolved.registry, resolved.device

    from rlsdk.trainer.run import StopFlag, run_train
    from rlsdk.trainer.run_folder import check_resume, make_run_dir

    check_resume(config)
    run_dir = make_run_dir(config)
    if resolved.makes_model:
        from rlsdk.trainer.quickstart import make_model

        config = make_model(config, run_dir)
    stop = StopFlag()
    with ConsoleView() as view, stop_on_signal(stop.set, view.notice) as stopped:
        view.notice(f"run {run_dir}")
        result = run_train(config, registry, view, run_dir=run_dir, device=device, stop=stop)
    tell(result, config)
    if result.steps < config.trainer.steps:
        sys.exit(stopped.exit_code)


def model_fields(config: RunConfig) -> Mapping[str, Any]:
    """`config.json` of the model: a folder's, or one of the hub. Empty where the configuration names no model.

    Raises:
        ConfigError: the folder holds no model; or there is none, and the hub has no model of this name either.
    """
    return {} if config.model.path is None else fields_of(config.model.path, config.model.revision, "model.path")


def fields_of(path: str, revision: str | None, field: str) -> Mapping[str, Any]:
    """`config.json` of a model's folder, or of one of the hub; errors begin with the name of the field.

    Raises:
        ConfigError: the folder holds no model; or there is none, and the hub has no model of this name either.
    """
    folder = Path(path)
    if not folder.is_dir():
        if not HUB_NAME.fullmatch(path):
            raise ConfigError(
                f"{field} {path!r}: no such folder, and not the name of a model on the hub, which is name or org/name"
            )
        from rlsdk.kit.hub import fetch_model_config

        return fetch_model_config(path, revision)
    try:
        fields: Mapping[str, Any] = json.loads((folder / "config.json").read_text())
        return {**fields, "model_type": str(fields["model_type"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{field}: {str(folder)!r} has no config.json with a model_type ({type(error).__name__}: {error})"
        ) from error


def with_model_path(config: RunConfig, path: str) -> RunConfig:
    return config.model_copy(update={"model": config.model.model_copy(update={"path": path})})


def names_a_task(args: Sequence[str]) -> bool:
    """True when the person brings a model, data or a file of their own; else the quickstart recipe is the base."""
    flags = {arg.split("=")[0] for arg in args}
    named = {"--model", "--model.path", "--data", "--data.train", "--config"}
    return bool(flags & named) or any(flag.startswith("--data.mixture") for flag in flags)


def tell(result: RunResult, config: RunConfig) -> None:
    """The last lines: what was reached, where everything is, what to type next."""
    from rlsdk.trainer.report import write_report

    say = SafeConsole(highlight=False, soft_wrap=True)
    say.print()
    for line in gains(config, result.first_eval, result.last_eval):
        say.print(line, markup=False)
    state = "stopped" if result.stopped or result.ended_early else "finished"
    say.print(f"{state} after {result.steps} steps, {result.seconds:.0f} s")
    here = _shown(result.run_dir)
    if "jsonl" in config.tracking.trackers:
        page, plot = write_report(result.run_dir)
        say.print(f"report      {_shown(page)}", markup=False)
        say.print(f"plot        {_shown(plot)}", markup=False)
    if result.checkpoint is not None:
        say.print(f"checkpoint  {_shown(result.checkpoint)}", markup=False)
        if result.best is not None and result.best_checkpoint is not None:
            say.print(f"best        {_shown(result.best_checkpoint)} ({result.best.line()})", markup=False)
        say.print("\nnext:", markup=False)
        rlsdk, more = command_here(), max(result.steps * 2, config.trainer.steps)
        trust = f" {TRUST_FLAG}" if next(code_in(config.model_dump()), None) else ""
        say.print(f"  {rlsdk} eval {_shown(result.checkpoint)}{trust}", markup=False)
        say.print(f"  {rlsdk} generate {_shown(result.checkpoint)} --num-prompts 5{trust}", markup=False)
        say.print(f"  {rlsdk} train --config {here}/config.yaml --resume {here} --steps {more}{trust}", markup=False)
        if trust:
            say.print(f"{TRUST_FLAG}: this run uses code of yours, which {here}/config.yaml names", markup=False)


def command_here() -> str:
    """What a person types to call this program again: its path, where the shell would find another one or none."""
    own, found = Path(sys.executable).with_name("rlsdk"), shutil.which("rlsdk")
    return _shown(own) if own.exists() and (found is None or not own.samefile(found)) else "rlsdk"


def _shown(path: Path) -> str:
    """Relative to where the person stands, when that is shorter."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
