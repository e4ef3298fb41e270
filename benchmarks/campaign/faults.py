"""What can happen to a run, for real: each fault strikes once in a while, and says what the run has to do about it."""

from __future__ import annotations

import random
import resource
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.campaign.runs import Run, lost

FULL_BYTES = 4096
"""No file grows beyond this while the disk is full."""


@dataclass(frozen=True)
class Fault:
    """Something that happens to a run."""

    name: str
    strike: Callable[[Run, random.Random], None]
    """Waits for its moment, and makes it happen."""
    goes_on: bool = False
    """The run must come to its end by itself; otherwise it ends, and is resumed by the same command."""


@dataclass(frozen=True)
class Outcome:
    """What became of one fault."""

    fault: str
    survived: bool
    seconds: float
    ended_with: int
    """Exit code of the run that the fault struck."""
    too_late: bool
    """The run had come to its end: it says nothing about the fault."""
    lost: Sequence[str]
    """What differs from the undisturbed run, and what was left behind."""


def strike(fault: Fault, folder: Path, model: str, whole: Run, seed: int) -> Outcome:
    """A fault on a new run: it must end as the undisturbed one did, number for number, at once or resumed."""
    run, start = Run(folder=folder, model=model, steps=whole.steps), time.monotonic()
    found: list[str] = []
    code, too_late = 0, False
    try:
        run.start()
        fault.strike(run, random.Random(seed))
        code = run.finish()
        found += [f"left behind: {what}" for what in run.left_behind()]
        found += ["a traceback"] if "Traceback (most recent call last)" in run.output and code not in (-9, 1) else []
        if fault.goes_on:
            found += [f"ended with {code}"] if code else []
        elif code == 0 and run.steps_logged() >= whole.steps:
            too_late = True
        elif code != 0 or run.steps_logged() < whole.steps:
            run.start()
            if again := run.finish():
                found.append(f"resuming ended with {again}")
        found += lost(run, whole)
    except TimeoutError as error:
        found.append(str(error))
    finally:
        run.close()
    return Outcome(
        fault=fault.name,
        survived=not found,
        seconds=time.monotonic() - start,
        ended_with=code,
        too_late=too_late,
        lost=found[:5],
    )


def _some_step(run: Run, chance: random.Random) -> None:
    """Comes back at some moment after the second step, before the last two."""
    after = chance.randint(2, max(2, run.steps - 3))
    run.wait_for(lambda: run.steps_logged() >= after, f"step {after}")
    run.look()
    time.sleep(chance.uniform(0.0, 0.3))


def _kill(run: Run, chance: random.Random, is_it: Callable[[psutil.Process], bool], what: str) -> None:
    _some_step(run, chance)
    found = []
    for process in run.look():
        with suppress(psutil.Error):
            found += [process] if is_it(process) else []
    if not found:
        raise TimeoutError(f"no {what} among the processes of the run")
    with suppress(psutil.NoSuchProcess):
        chance.choice(found).kill()


def _controller(run: Run, chance: random.Random) -> None:
    _some_step(run, chance)
    assert run.process is not None
    run.process.kill()


def _terminated(run: Run, chance: random.Random) -> None:
    _some_step(run, chance)
    assert run.process is not None
    run.process.send_signal(signal.SIGTERM)


def _grader(run: Run, chance: random.Random) -> None:
    _kill(run, chance, lambda p: any("rlsdk.rewards" in part for part in p.cmdline()), "grader")


def _engine(run: Run, chance: random.Random) -> None:
    _kill(run, chance, lambda p: "DeviceWorker" in " ".join(p.cmdline()), "worker")


def _daemon(name: str) -> Callable[[Run, random.Random], None]:
    return lambda run, chance: _kill(run, chance, lambda p: p.name() == name, name)


def _full_disk(run: Run, chance: random.Random) -> None:
    """No process of the run may write more to a file: as on a full disk, an error of the write."""
    _some_step(run, chance)
    assert run.process is not None
    for pid in (run.process.pid, *(p.pid for p in run.family if "DeviceWorker" in _command(p))):
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (FULL_BYTES, FULL_BYTES))


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _damaged(run: Run, chance: random.Random) -> None:
    """Killed after its second checkpoint, one bit of which is changed then."""
    run.wait_for(lambda: len(run.store.whole()) >= 2, "second checkpoint")
    run.look()
    assert run.process is not None
    run.process.kill()
    run.process.wait()
    newest = run.store.newest()
    assert newest is not None
    file = chance.choice(sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size))
    content = bytearray(file.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(bytes(content))


FAULTS = (
    Fault("controller killed (-9)", _controller),
    Fault("controller terminated (SIGTERM)", _terminated),
    Fault("grader killed (-9)", _grader, goes_on=True),
    Fault("engine process killed (-9)", _engine, goes_on=True),
    Fault("Ray's gcs killed (-9)", _daemon("gcs_server"), goes_on=True),
    Fault("Ray's raylet killed (-9)", _daemon("raylet"), goes_on=True),
    Fault("disk full", _full_disk),
    Fault("newest checkpoint damaged", _damaged),
)
