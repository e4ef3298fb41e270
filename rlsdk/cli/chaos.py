"""`rlsdk chaos RUN-ARGS...`: what a run of these arguments comes to when its processes are killed."""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from rlsdk.api.chaos import MOMENTS, PROCESSES, ChaosRun, Fault, Outcome, strike
from rlsdk.api.resolve import resolve
from rlsdk.api.settings import Settings
from rlsdk.interfaces import ConfigError, RlsdkError
from rlsdk.views.terminal import SafeConsole

RESULTS = "chaos.json"


def run(args: Sequence[str], kills: Sequence[str], faults: int, seed: int, folder: Path) -> None:
    """Makes the run once undisturbed, then once for each fault; prints a table, and ends with 1 where something was
    lost.

    Raises:
        ConfigError: no such process or moment, or a folder that holds something.
        RlsdkError: the undisturbed run did not come to its end.
    """
    from rlsdk.trainer.roles import roles

    resolved = resolve(Settings(flags=list(args)))
    pools = {role.name: role.pool for role in roles(resolved.config, resolved.device)}
    chance = random.Random(seed)
    chosen = [Fault.parse(text, list(pools)) for text in kills] or drawn(list(pools), chance)
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"--folder {str(folder)!r} is not empty; give a new one")
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    say = SafeConsole(highlight=False, soft_wrap=True)
    whole = ChaosRun(args, folder, "whole", pools)
    whole.start()
    if whole.process.wait():
        raise RlsdkError(f"the undisturbed run ended with {whole.process.returncode}:\n{whole.text()[-2000:]}")
    say.print(f"undisturbed run: {max(whole.updates())} steps; {folder}", markup=False)
    outcomes: list[Outcome] = []
    for number, fault in enumerate(itertools.islice(itertools.cycle(chosen), faults or len(chosen)), 1):
        outcomes.append(strike(ChaosRun(args, folder, f"fault_{number}", pools), fault, whole, chance))
        (folder / RESULTS).write_text(json.dumps([asdict(one) for one in outcomes], indent=1) + "\n", encoding="utf-8")
        say.print(line_of(outcomes[-1]), markup=False)
    say.print(table_of(outcomes))
    if any(outcome.wrong or outcome.prompts_lost or outcome.trained_twice for outcome in outcomes):
        sys.exit(1)


def drawn(roles: Sequence[str], chance: random.Random) -> list[Fault]:
    """Every process at every moment, in an order that the seed draws."""
    found = [Fault(role=role, moment=moment) for role in (*roles, *PROCESSES) for moment in MOMENTS]
    chance.shuffle(found)
    return found


def line_of(outcome: Outcome) -> str:
    """In a few words."""
    if not outcome.struck:
        return f"{outcome.fault}: the moment did not come"
    wrong = "; ".join(outcome.wrong)
    return f"{outcome.fault} behind step {outcome.step}: recovered after {_seconds(outcome.recover_s)} {wrong}"


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
