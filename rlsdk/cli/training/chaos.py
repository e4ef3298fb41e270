"""`rlsdk chaos RUN-ARGS...`: kills processes of runs with these arguments, and measures what is lost."""

from __future__ import annotations

import json
import random
import shlex
import shutil
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict
from itertools import cycle, islice
from pathlib import Path
from types import FrameType

from rich.table import Table

from rlsdk.api.resolve import resolve
from rlsdk.api.settings import Settings
from rlsdk.chaos.account import Outcome
from rlsdk.chaos.faults import MOMENTS, Fault, strike
from rlsdk.chaos.run import PROCESSES, ChaosRun
from rlsdk.config.loading.overrides import split_arguments
from rlsdk.config.loading.trust import take_trust_flag
from rlsdk.interfaces import ConfigError, RlsdkError
from rlsdk.system.atomic import atomic_write_bytes
from rlsdk.system.files import is_pipe, read_regular_text
from rlsdk.views.terminal import SafeConsole

RESULTS = "chaos.json"
WHOLE = "whole"
"""Name of the undisturbed run (without faults)."""


def run(
    args: Sequence[str], kills: Sequence[str], faults: int, seed: int, folder: Path, per_run: int, minutes: float
) -> None:
    """Runs once without faults, then runs with faults, as many per run as its steps have time for; prints a table.

    Exits with 1 if something was lost. If the folder already has faults of the same arguments, new ones are added.

    Raises:
        ConfigError: there is no such process or moment, or the folder has other content.
        RlsdkError: the undisturbed run failed.
    """
    deadline = time.monotonic() + 60 * minutes
    check_files(args)
    pools = {role.name: role.pool for role in resolve(Settings(flags=list(args))).table}
    chosen = [Fault.parse(text, list(pools)) for text in kills]
    outcomes = earlier(args, folder)
    folder = folder.resolve()
    say = SafeConsole(highlight=False, soft_wrap=True)
    chance = random.Random(f"{seed} {len(outcomes)}")
    chosen = chosen or least_struck(list(pools), outcomes, chance)
    wanted = faults or len(chosen)
    end_on_signals()
    whole = undisturbed(args, folder, pools)
    say.print(f"undisturbed run: {max(whole.updates())} steps; {folder}", markup=False)
    save(args, folder, outcomes)
    waiting = deque(islice(cycle(chosen), wanted))

    def keep(found: Sequence[Outcome]) -> None:
        """Saves after each fault, so that an interrupted campaign keeps the rows of all finished faults."""
        say.print(line_of(found[-1]), markup=False)
        save(args, folder, [*outcomes, *found])

    while waiting and (not minutes or time.monotonic() < deadline):
        number = 1 + max((int(path.stem.partition("_")[2]) for path in folder.glob("faults_*.txt")), default=0)
        outcomes += strike(
            ChaosRun(args, folder, f"faults_{number}", pools),
            waiting,
            whole,
            chance,
            most=per_run,
            goes_on=lambda: not minutes or time.monotonic() < deadline,
            report=keep,
        )
        save(args, folder, outcomes)
    say.print(table_of(outcomes))
    costs = [f"{outcome.fault} after step {outcome.step} of {outcome.run}: {outcome.cost}" for outcome in outcomes]
    for outcome, said in zip(outcomes, costs, strict=True):
        if outcome.cost:
            say.print(said, markup=False)
    if any(outcome.cost for outcome in outcomes):
        sys.exit(1)


def check_files(args: Sequence[str]) -> None:
    """Refuses configuration files that can be read only once.

    Raises:
        ConfigError: one is a pipe.
    """
    for file in split_arguments(take_trust_flag(args)[0])[0]:
        if is_pipe(file):
            raise ConfigError(
                f"--config {file!r}: is a pipe, which can be read only once, but every run of `rlsdk chaos` reads the "
                "configuration; write it to a file"
            )


def end_on_signals() -> None:
    """Makes the first SIGINT or SIGTERM end the current run and then this program.

    Further signals are ignored: they would interrupt this, and leave processes of the run behind.
    """

    def end(number: int, frame: FrameType | None) -> None:
        for either in (signal.SIGINT, signal.SIGTERM):
            signal.signal(either, signal.SIG_IGN)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # ignored for background jobs of a shell
            signal.signal(number, end)


def earlier(args: Sequence[str], folder: Path) -> list[Outcome]:
    """Returns the earlier faults of runs with these arguments in the folder; creates the folder if needed.

    A folder that has only an interrupted undisturbed run has no faults yet.

    Raises:
        ConfigError: the folder has other content, or faults of other arguments.
    """
    file = folder / RESULTS
    if not file.is_file():
        names = {path.name for path in folder.iterdir()} if folder.exists() else set()
        # The output file is created before the run's folder.
        if names and names not in ({f"{WHOLE}.txt"}, {f"{WHOLE}.txt", WHOLE}):
            raise ConfigError(f"--folder {str(folder)!r} is not empty and has no {RESULTS}; give a new folder")
        folder.mkdir(parents=True, exist_ok=True)
        return []
    found = json.loads(read_regular_text(file))
    if found["arguments"] != list(args):
        raise ConfigError(
            f"--folder {str(folder)!r} has faults of a run with other arguments ({' '.join(found['arguments'])}); "
            "give the same arguments to add faults, or a new folder"
        )
    return [Outcome(**one) for one in found["outcomes"]]


def save(args: Sequence[str], folder: Path, outcomes: Sequence[Outcome]) -> None:
    """Writes the results atomically."""
    content = {"arguments": list(args), "outcomes": [asdict(one) for one in outcomes]}
    atomic_write_bytes(folder / RESULTS, (json.dumps(content, indent=1) + "\n").encode())


def undisturbed(args: Sequence[str], folder: Path, pools: dict[str, str]) -> ChaosRun:
    """Returns the run without faults, to which the others are compared; runs it first if the folder has no faults yet.

    The run ends with this program. An undisturbed run that was interrupted is repeated.

    Raises:
        ConfigError: the folder has faults but has lost that run, or an earlier undisturbed run is still running.
        RlsdkError: the run failed.
    """
    whole = ChaosRun(args, folder, WHOLE, pools)
    if not (folder / RESULTS).is_file():
        _remove(whole)
        try:
            whole.start()
            code = whole.process.wait()
        except BaseException:
            whole.end()
            raise
        if code:
            raise RlsdkError(f"the undisturbed run ended with {code}:\n{whole.text()[-2000:]}")
    if not whole.updates():
        raise ConfigError(
            f"--folder {str(folder)!r} has faults ({RESULTS}), but not the undisturbed run that they are compared "
            f"to: the journal of {str(whole.run_dir)!r} has no update of a step. Restore {whole.run_dir.name!r}, or "
            f"start again: rlsdk chaos --folder {shlex.quote(f'{folder}_2')} {shlex.join(args)}"
        )
    return whole


def _remove(whole: ChaosRun) -> None:
    """Removes the output of an undisturbed run that was interrupted.

    Raises:
        ConfigError: it is still running.
    """
    from rlsdk.trainer.checkpoints.run_folder import run_lock

    if whole.run_dir.is_dir():
        with run_lock(whole.run_dir):
            shutil.rmtree(whole.run_dir)
    whole.output.unlink(missing_ok=True)


def least_struck(roles: Sequence[str], outcomes: Sequence[Outcome], chance: random.Random) -> list[Fault]:
    """Returns every process at every moment, in random order, those with the fewest attempts so far first."""
    found = [Fault(role=role, moment=moment) for role in (*roles, *PROCESSES) for moment in MOMENTS]
    chance.shuffle(found)
    tried = Counter(outcome.fault for outcome in outcomes)
    return sorted(found, key=lambda fault: tried[str(fault)])


def line_of(outcome: Outcome) -> str:
    """Returns one line about a fault, printed as soon as it is over."""
    if not outcome.struck:
        return f"{outcome.fault}: this moment did not occur"
    wrong = "; ".join(outcome.wrong)
    return f"{outcome.fault} after step {outcome.step}: recovered after {_seconds(outcome.recover_s)} {wrong}"


def table_of(outcomes: Sequence[Outcome]) -> Table:
    """Returns a table with one row per fault."""
    table = Table(box=None)
    for column in ("fault", "moment", "lost", "twice", "again", "detect", "recover", "commands", "difference"):
        table.add_column(column, justify="left" if column in ("fault", "moment") else "right")
    for one in outcomes:
        role, _, moment = one.fault.partition("@")
        if not one.struck:
            table.add_row(role, moment, *["-"] * 7)
            continue
        counts = map(str, (one.prompts_lost, one.trained_twice, one.steps_again))
        times = map(_seconds, (one.detect_s, one.recover_s))
        table.add_row(role, moment, *counts, *times, str(one.commands), f"{one.difference:.2g}")
    return table


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"
