"""`rlsdk train`: reinforcement learning; without arguments, the quickstart."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlsdk.api.resolve import resolve
from rlsdk.api.settings import Settings
from rlsdk.api.signals import Stopped, stop_on_signal
from rlsdk.cli.errors import BEGUN
from rlsdk.config.checks.training import Training
from rlsdk.config.loading.trust import TRUST_FLAG, code_in
from rlsdk.interfaces import ConfigError, RlsdkError
from rlsdk.system.quantities import counted
from rlsdk.trainer.runs.launch import launch
from rlsdk.views.console import ConsoleView
from rlsdk.views.figures import gains
from rlsdk.views.terminal import SafeConsole

if TYPE_CHECKING:
    from rlsdk.trainer.runs.start import RunResult


def train(training: Training, args: Sequence[str]) -> tuple[RunResult, Stopped]:
    """Checks the configuration, data and devices, then trains; prints progress."""
    run = resolve(Settings(flags=args), training)

    from rlsdk.trainer.tracking.stopping import StopFlag

    stop = StopFlag()
    with (
        ConsoleView() as view,
        stop_on_signal(stop.set, view.notice, preempt=stop.preempt, has_begun=lambda: stop.has_begun) as stopped,
    ):
        try:
            return launch(run, view, stop), stopped
        except (RlsdkError, OSError) as error:
            if stop.has_begun:
                error.add_note(BEGUN)
            raise


def run(args: Sequence[str]) -> None:
    """Trains, and prints the next commands."""
    result, stopped = train(Training.RL, args)
    tell(result)
    if result.steps < result.config.trainer.steps:
        sys.exit(stopped.exit_code)


def tell(result: RunResult) -> None:
    """Prints the result, the paths of all outputs, and the next commands."""
    config = result.config
    say = SafeConsole(highlight=False, soft_wrap=True)
    say.print()
    for line in gains(config, result.first_eval, result.last_eval):
        say.print(line, markup=False)
    state = "stopped" if result.stopped or result.ended_early else "finished"
    say.print(f"{state} after {counted(result.steps, 'step')}, {result.seconds:.0f} s")
    here = quoted(result.run_dir)
    if "jsonl" in config.tracking.trackers:
        for line in report_lines(result.run_dir):
            say.print(line, markup=False)
    file = quoted(result.run_dir / "config.yaml")
    trust = f" {TRUST_FLAG}" if next(code_in(config.model_dump()), None) else ""
    if result.checkpoint is None and result.stopped:
        say.print(f"\nnext:\n  {command_here()} train --config {file} --resume {here}{trust}", markup=False)
    if result.checkpoint is not None:
        say.print(f"checkpoint  {shown(result.checkpoint)}", markup=False)
        if result.best is not None and result.best_checkpoint is not None:
            say.print(f"best        {shown(result.best_checkpoint)} ({result.best.line()})", markup=False)
        say.print("\nnext:", markup=False)
        rlsdk, more = command_here(), max(result.steps * 2, config.trainer.steps)
        checkpoint = quoted(result.checkpoint)
        say.print(f"  {rlsdk} eval {checkpoint}{trust}", markup=False)
        say.print(f"  {rlsdk} generate {checkpoint} --num-prompts 5{trust}", markup=False)
        resumed = here if result.checkpoint.is_relative_to(result.run_dir) else checkpoint
        say.print(f"  {rlsdk} train --config {file} --resume {resumed} --steps {more}{trust}", markup=False)
        if trust:
            say.print(f"{TRUST_FLAG}: this run uses your own code, which {file} names", markup=False)


def report_lines(run_dir: Path) -> Sequence[str]:
    """Writes the report of a run; returns the paths of its files, or why there are none: the run itself is over."""
    from rlsdk.trainer.tracking.trackers import METRICS_FILE, read_metrics
    from rlsdk.views.report import write_report

    try:
        if not read_metrics(run_dir):
            return [f"report      none: no step was made in this folder ({METRICS_FILE} has no lines)"]
        page, plot = write_report(run_dir)
    except (ConfigError, OSError) as error:
        return [f"report      none: {error}"]
    return [f"report      {shown(page)}", f"plot        {shown(plot)}"]


def command_here() -> str:
    """Returns how to call this program again: by its path, if the shell would find another program or none."""
    own, found = Path(sys.executable).with_name("rlsdk"), shutil.which("rlsdk")
    return quoted(own) if own.exists() and (found is None or not own.samefile(found)) else "rlsdk"


def quoted(path: Path) -> str:
    """Returns a path quoted for a shell, relative to the current folder if it is inside."""
    return shlex.quote(shown(path))


def shown(path: Path) -> str:
    """Returns a path relative to the current folder if it is inside, else absolute."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
