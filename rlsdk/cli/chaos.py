"""`rlsdk chaos RUN-ARGS...`: what a run of these arguments comes to when its processes are killed."""

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

from rlsdk.api.chaos import MOMENTS, Fault, strike
from rlsdk.api.chaos_account import Outcome
from rlsdk.api.chaos_run import PROCESSES, ChaosRun
from rlsdk.api.resolve import resolve
from rlsdk.api.settings import Settings
from rlsdk.interfaces import ConfigError, RlsdkError
from rlsdk.kit.atomic import atomic_write_bytes
from rlsdk.views.terminal import SafeConsole

RESULTS = "chaos.json"
WHOLE = "whole"
"""Name of the undisturbed run."""


def run(
    args: Sequence[str], kills: Sequence[str], faults: int, seed: int, folder: Path, per_run: int, minutes: float
) -> None:
    """Makes the run once undisturbed, then strikes others like it, each as often as its steps give time for; prints a
    table, and ends with 1 where something was lost. A folder that holds faults of the same arguments gets more.

    Raises:
        ConfigError: no such process or moment, or a folder that holds something else.
        RlsdkError: the undisturbed run did not come to its end.
    """
    from rlsdk.trainer.roles import roles

    deadline = time.monotonic() + 60 * minutes
    resolved = resolve(Settings(flags=list(args)))
    pools = {role.name: role.pool for role in roles(resolved.config, resolved.device)}
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
        """A campaign that is cut has the rows of all faults that were over."""
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


def end_on_signals() -> None:
    """From now on the first SIGINT or SIGTERM ends this program, and the run under way before it. A signal that comes
    meanwhile is ignored: it would cut that short, and leave processes of the run behind."""

    def end(number: int, frame: FrameType | None) -> None:
        for either in (signal.SIGINT, signal.SIGTERM):
            signal.signal(either, signal.SIG_IGN)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as in a shell's background
            signal.signal(number, end)


def earlier(args: Sequence[str], folder: Path) -> list[Outcome]:
    """What the folder holds of faults that struck runs of these arguments; it is made where there is none. One with
    nothing but an undisturbed run that was cut holds none yet.

    Raises:
        ConfigError: it holds something else.
    """
    file = folder / RESULTS
    if not file.is_file():
        names = {path.name for path in folder.iterdir()} if folder.exists() else set()
        # The output is there before the run's folder.
        if names and names not in ({f"{WHOLE}.txt"}, {f"{WHOLE}.txt", WHOLE}):
            raise ConfigError(f"--folder {str(folder)!r} is not empty and has no {RESULTS}; give a new one")
        folder.mkdir(parents=True, exist_ok=True)
        return []
    found = json.loads(file.read_text(encoding="utf-8"))
    if found["arguments"] != list(args):
        raise ConfigError(
            f"--folder {str(folder)!r} holds faults of a run with other arguments ({' '.join(found['arguments'])}); "
            "give the same ones to add to it, or a new folder"
        )
    return [Outcome(**one) for one in found["outcomes"]]


def save(args: Sequence[str], folder: Path, outcomes: Sequence[Outcome]) -> None:
    """Whole, or as it was before."""
    content = {"arguments": list(args), "outcomes": [asdict(one) for one in outcomes]}
    atomic_write_bytes(folder / RESULTS, (json.dumps(content, indent=1) + "\n").encode())


def undisturbed(args: Sequence[str], folder: Path, pools: dict[str, str]) -> ChaosRun:
    """The run that the others are held against, which is made where the folder has no faults yet. It ends with this
    program; one that did not come to its end is made again.

    Raises:
        ConfigError: the folder has faults, and has lost that run; or an earlier one still goes on.
        RlsdkError: it did not come to its end.
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
            f"--folder {str(folder)!r} holds faults ({RESULTS}), and not the undisturbed run that they were held "
            f"against: the journal of {str(whole.run_dir)!r} has no update of a step. Bring {whole.run_dir.name!r} "
            f"back, or begin anew: rlsdk chaos --folder {shlex.quote(f'{folder}_2')} {shlex.join(args)}"
        )
    return whole


def _remove(whole: ChaosRun) -> None:
    """Removes what an undisturbed run wrote that was cut.

    Raises:
        ConfigError: it still goes on.
    """
    from rlsdk.trainer.run_folder import run_lock

    if whole.run_dir.is_dir():
        with run_lock(whole.run_dir):
            shutil.rmtree(whole.run_dir)
    whole.output.unlink(missing_ok=True)


def least_struck(roles: Sequence[str], outcomes: Sequence[Outcome], chance: random.Random) -> list[Fault]:
    """Every process at every moment, in an order that the seed draws: first those that were struck, or tried in vain,
    least often."""
    found = [Fault(role=role, moment=moment) for role in (*roles, *PROCESSES) for moment in MOMENTS]
    chance.shuffle(found)
    tried = Counter(outcome.fault for outcome in outcomes)
    return sorted(found, key=lambda fault: tried[str(fault)])


def line_of(outcome: Outcome) -> str:
    """In a few words, as soon as it is over."""
    if not outcome.struck:
        return f"{outcome.fault}: the moment did not come"
    wrong = "; ".join(outcome.wrong)
    return f"{outcome.fault} after step {outcome.step}: recovered after {_seconds(outcome.recover_s)} {wrong}"


def table_of(outcomes: Sequence[Outcome]) -> Table:
    """One row a fault."""
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
