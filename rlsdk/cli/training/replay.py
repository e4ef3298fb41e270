"""`rlsdk replay RUN`: repeats the updates of a run from its journal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rlsdk.api.resolve import resolve
from rlsdk.api.settings import Settings
from rlsdk.interfaces import ConfigError
from rlsdk.views.console import ConsoleView
from rlsdk.views.terminal import SafeConsole


def run(run_dir: Path, trust: Sequence[str]) -> None:
    """Prints the largest difference of each step; exits with 1 if there is any difference.

    Raises:
        ConfigError: the folder is not the folder of a run.
    """
    from rlsdk.trainer.runs.replay import run_replay

    path = run_dir / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{str(run_dir)!r} has no config.yaml; give the folder of a run (runs/NAME)")
    run = resolve(Settings(flags=["--config", str(path), *trust]))
    say, largest = SafeConsole(highlight=False, soft_wrap=True), 0.0
    with (
        ConsoleView() as view,
        run_replay(run, view, run_dir=run_dir) as (count, steps),
    ):
        for step in steps:
            largest = max(largest, step.difference)
            view.notice(f"step {step.step} of {count}: largest relative difference {step.difference:.3g}")
    same = "the same updates" if largest == 0 else f"largest relative difference {largest:.3g}"
    say.print(f"replayed {count} steps of {run_dir}: {same}", markup=False)
    if largest > 0:
        sys.exit(1)
