"""`rlsdk chaos RUN-ARGS...`: kills processes of runs with these arguments, and measures what is lost."""

from __future__ import annotations

import random
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from types import FrameType

from rich.table import Table

from rlsdk.api.resolve import resolve
from rlsdk.api.settings import Settings
from rlsdk.chaos.account import Outcome, token_problems
from rlsdk.chaos.campaign import earlier, least_struck, save, undisturbed
from rlsdk.chaos.faults import MOMENTS, TURN, Fault, strike
from rlsdk.chaos.run import AGENT, ChaosRun
from rlsdk.config.loading.overrides import split_arguments
from rlsdk.config.loading.trust import take_trust_flag
from rlsdk.config.sections.engines import SINGLE_TURN
from rlsdk.interfaces import ConfigError
from rlsdk.system.files import is_pipe
from rlsdk.views.terminal import SafeConsole


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
    resolved = resolve(Settings(flags=list(args)))
    pools = {role.name: role.pool for role in resolved.table}
    rollout = resolved.config.rollout
    roles = [*pools, *([AGENT] if rollout.command else [])]
    chosen = [Fault.parse(text, roles) for text in kills]
    outcomes = earlier(args, folder)
    folder = folder.resolve()
    say = SafeConsole(highlight=False, soft_wrap=True)
    chance = random.Random(f"{seed} {len(outcomes)}")
    has_episodes = rollout.environment is not None or rollout.has_agent or rollout.rollouter != SINGLE_TURN
    moments = [*MOMENTS, TURN] if has_episodes else MOMENTS
    chosen = chosen or least_struck(roles, outcomes, chance, moments)
    wanted = faults or len(chosen)
    end_on_signals()
    whole = undisturbed(args, folder, pools, lambda text: say.print(text, markup=False))
    say.print(f"undisturbed run: {max(whole.updates())} steps; {folder}", markup=False)
    save(args, folder, outcomes)
    waiting = deque(islice(cycle(chosen), wanted))

    def keep(found: Sequence[Outcome]) -> None:
        """Saves after each fault, so that an interrupted campaign keeps the rows of all finished faults."""
        say.print(line_of(found[-1]), markup=False)
        save(args, folder, [*outcomes, *found])

    while waiting and (not minutes or time.monotonic() < deadline):
        number = 1 + max((int(path.stem.partition("_")[2]) for path in folder.glob("faults_*.txt")), default=0)
        struck = ChaosRun(args, folder, f"faults_{number}", pools)
        outcomes += strike(
            struck,
            waiting,
            whole,
            chance,
            most=per_run,
            has_time=lambda: not minutes or time.monotonic() < deadline,
            report=keep,
        )
        outcomes[-1].wrong += token_problems(struck) if outcomes[-1].struck else []
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
