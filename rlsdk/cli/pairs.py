"""`rlsdk reward-model` and `rlsdk dpo`: training from pairs of answers, on the same engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rlsdk.cli.console import ConsoleView
from rlsdk.cli.signals import stop_on_signal
from rlsdk.cli.train import command_here, model_fields
from rlsdk.config import PairTraining, check_run, config_error, load_config, pair_problems, pair_roles, roles
from rlsdk.registry import Registry

if TYPE_CHECKING:
    from rlsdk.trainer.run import RunResult


def run(kind: PairTraining, args: Sequence[str]) -> None:
    """Trains, and leaves a Hugging Face folder."""
    registry = Registry.discover()
    config = load_config([], list(args), registry)

    from rlsdk.trainer.pair_run import run_pairs
    from rlsdk.trainer.roles import resolve_device, role_devices
    from rlsdk.trainer.run import StopFlag
    from rlsdk.trainer.run_data import check_sources
    from rlsdk.trainer.run_folder import check_resume, make_run_dir

    device = resolve_device(config.placement)
    table = pair_roles(config, kind, roles(config, needed=kind.role_names))
    devices = role_devices(config, device, needed=kind.role_names)
    model = model_fields(config)
    problems = [
        *pair_problems(config, kind),
        *check_run(
            config,
            registry,
            model.get("model_type"),
            device,
            devices=devices,
            table=table,
            train_only=True,
            model=model,
        ),
    ]
    if problems:
        raise config_error(problems)
    check_sources(config, registry)
    check_resume(config, kind.checkpoints)
    run_dir = make_run_dir(config)
    stop = StopFlag()
    with ConsoleView() as view, stop_on_signal(stop.set, view.notice):
        view.notice(f"run {run_dir}")
        result = run_pairs(config, kind, registry, view, run_dir=run_dir, device=device, stop=stop)
    print(f"\n{_figures(kind, result)} after {result.steps} steps, {result.seconds:.0f} s\nmodel  {result.checkpoint}")
    print(f"\nnext:\n  {command_here()} {_next_command(kind, result)}")


def _figures(kind: PairTraining, result: RunResult) -> str:
    before, after = _accuracy(kind, result.first_eval), _accuracy(kind, result.last_eval)
    held_out = "held-out " if "eval/accuracy_pairs" in result.last_eval else ""
    return f"{held_out}pairs right {f'{before:.1%} -> ' if before is not None else ''}{after or 0.0:.1%}"


def _accuracy(kind: PairTraining, metrics: Mapping[str, float]) -> float | None:
    return metrics.get("eval/accuracy_pairs", metrics.get(f"{kind.label}/accuracy"))


def _next_command(kind: PairTraining, result: RunResult) -> str:
    if kind is PairTraining.DPO:
        return f"generate {result.checkpoint} --prompt '...'"
    return f"train --reward_models '[{{path: {result.checkpoint}}}]' ..."
