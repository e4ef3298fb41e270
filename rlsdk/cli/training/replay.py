"""`rlsdk replay RUN`: repeats the updates of a run from its journal, or plays its episodes again."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlsdk.api.resolve import resolve
from rlsdk.api.settings import Settings
from rlsdk.interfaces import ConfigError
from rlsdk.views.console import ConsoleView
from rlsdk.views.terminal import SafeConsole

if TYPE_CHECKING:
    from rlsdk.trainer.runs.prepare import PreparedRun

MOST_NAMED = 8
"""Most episodes that are named."""


def run(run_dir: Path, trust: Sequence[str]) -> None:
    """Prints the largest difference of each step; exits with 1 if there is any difference.

    Raises:
        ConfigError: the folder is not the folder of a run.
    """
    from rlsdk.trainer.runs.replay import run_replay

    run = _resolved(run_dir, trust)
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


def run_episodes(run_dir: Path, trust: Sequence[str]) -> None:
    """Prints where episodes depart from the journal; exits with 1 if one does.

    Raises:
        ConfigError: the folder is not the folder of a run.
        CheckpointError: it has no journal of episodes.
    """
    from rlsdk.trainer.runs.replay_episodes import replay_episodes

    run = _resolved(run_dir, trust)
    say = SafeConsole(highlight=False, soft_wrap=True)
    with ConsoleView() as view:
        played = replay_episodes(run, view, run_dir=run_dir)
    others = [one for one in played if one.difference]
    for one in others[:MOST_NAMED]:
        say.print(f"group {one.group}, sample {one.index}, {one.difference}", markup=False)
    said = f"{len(others)} depart from the journal" if others else "all as in the journal"
    say.print(f"played {len(played)} episodes of {run_dir} again: {said}", markup=False)
    if others:
        sys.exit(1)


def _resolved(run_dir: Path, trust: Sequence[str]) -> PreparedRun:
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{str(run_dir)!r} has no config.yaml; give the folder of a run (runs/NAME)")
    return resolve(Settings(flags=["--config", str(path), *trust]))
