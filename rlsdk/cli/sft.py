"""`rlsdk sft`: supervised training on reference answers, on the same engines."""

from __future__ import annotations

from collections.abc import Sequence

from rlsdk.cli.console import ConsoleView
from rlsdk.cli.signals import stop_on_signal
from rlsdk.cli.train import command_here, model_fields
from rlsdk.config import check_run, config_error, load_config
from rlsdk.registry import Registry


def run(args: Sequence[str]) -> None:
    """Trains, and leaves a Hugging Face folder."""
    registry = Registry.discover()
    config = load_config([], list(args), registry)

    from rlsdk.trainer.roles import resolve_device, role_devices
    from rlsdk.trainer.run import StopFlag, run_sft
    from rlsdk.trainer.run_data import check_sources
    from rlsdk.trainer.run_folder import check_resume, make_run_dir
    from rlsdk.trainer.sft import CHECKPOINTS

    device = resolve_device(config.placement)
    devices = role_devices(config, device, train_only=True)
    model = model_fields(config)
    kind = model.get("model_type")
    if problems := check_run(config, registry, kind, device, devices=devices, train_only=True, model=model):
        raise config_error(problems)
    check_sources(config, registry)
    check_resume(config, CHECKPOINTS)
    run_dir = make_run_dir(config)
    stop = StopFlag()
    with ConsoleView() as view, stop_on_signal(stop.set, view.notice):
        view.notice(f"run {run_dir}")
        result = run_sft(config, registry, view, run_dir=run_dir, device=device, stop=stop)
    loss = result.last_eval.get("sft/loss", float("nan"))
    print(f"\nloss {loss:.4f} after {result.steps} steps, {result.seconds:.0f} s\nmodel  {result.checkpoint}")
    print(f"\nnext:\n  {command_here()} generate {result.checkpoint} --prompt '...'")
