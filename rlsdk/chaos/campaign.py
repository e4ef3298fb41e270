"""The folder of a campaign: the undisturbed run, the faults so far, and which come next."""

from __future__ import annotations

import json
import random
import shlex
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from rlsdk.chaos.account import Outcome
from rlsdk.chaos.faults import MOMENTS, Fault
from rlsdk.chaos.run import PROCESSES, ChaosRun
from rlsdk.interfaces import ConfigError, RlsdkError
from rlsdk.system.atomic import atomic_write_bytes
from rlsdk.system.files import read_regular_text

RESULTS = "chaos.json"
WHOLE = "whole"
"""Name of the undisturbed run (without faults)."""


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


def undisturbed(
    args: Sequence[str], folder: Path, pools: dict[str, str], say: Callable[[str], None] = print
) -> ChaosRun:
    """Returns the run without faults, to which the others are compared; runs it first if the folder has no faults yet.

    The run ends with this program; `say` gets a line before it begins. An undisturbed run that was interrupted is
    repeated.

    Raises:
        ConfigError: the folder has faults but has lost that run, or an earlier undisturbed run is still running.
        RlsdkError: the run failed.
    """
    whole = ChaosRun(args, folder, WHOLE, pools)
    if not (folder / RESULTS).is_file():
        _remove(whole)
        say(f"first a run without faults, to compare the others with; its output: {whole.output}")
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


def least_struck(
    roles: Sequence[str], outcomes: Sequence[Outcome], chance: random.Random, moments: Sequence[str] = MOMENTS
) -> list[Fault]:
    """Returns every process at every moment, in random order, those with the fewest attempts so far first."""
    found = [Fault(role=role, moment=moment) for role in (*roles, *PROCESSES) for moment in moments]
    chance.shuffle(found)
    tried = Counter(outcome.fault for outcome in outcomes)
    return sorted(found, key=lambda fault: tried[str(fault)])
