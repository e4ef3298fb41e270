"""`rlsdk migrate`: the run file of a script that was written for another trainer."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from rlsdk.api.resolve import resolve
from rlsdk.api.settings import Settings
from rlsdk.config.checks.training import Training
from rlsdk.interfaces import ConfigError
from rlsdk.migrate.draft import Draft
from rlsdk.migrate.read import migrate
from rlsdk.migrate.reward_source import reward_module
from rlsdk.migrate.writing import run_file, summary, table
from rlsdk.system.atomic import atomic_write_text
from rlsdk.system.printable import printable


def run(script: Path, to: Path, *, plans: bool, devices: int | None, hardware: str | None, force: bool) -> None:
    """Writes the run file and prints the table; with `plans`, checks the run as its command would.

    Raises:
        ConfigError: the script is of no known trainer, the file exists, or the run is refused.
    """
    if to.exists() and not force:
        raise ConfigError(f"{str(to)!r} already exists; give another name with --to, or --force")
    rewards = to.with_name(f"{to.stem}_rewards.py")
    draft = migrate(script, devices=devices, rewards_file=str(rewards))
    if draft.functions and rewards.exists() and not force:
        raise ConfigError(f"{str(rewards)!r} already exists; give another name with --to, or --force")
    try:
        atomic_write_text(to, run_file(draft))
        if draft.functions:
            module = reward_module(draft.script.text, draft.functions, draft.script.source)
            atomic_write_text(rewards, module)
    except OSError as error:
        raise ConfigError(f"{str(to)!r} cannot be written: {error.strerror}; choose another path") from error
    print(printable(table(draft)))
    counts = ", ".join(f"{number} {fate.value}" for fate, number in summary(draft).items() if number)
    written = f"{to} and {rewards}" if draft.functions else str(to)
    print(printable(f"\nwrote {written}: of the script's settings {counts}"))
    for row in draft.rows:
        if row.stops:
            print(printable(f"before it can start: {row.name}: {row.why}"))
    if plans:
        sys.stdout.flush()
        _plan(draft, to, hardware)
    else:
        name = shlex.quote(str(to))
        first = f"rlsdk plan --config {name}" if draft.script.command == "train" else ""
        print(printable("\nnext:" + (f"\n  {first}{_hardware(draft)}" if first else "")
                        + f"\n  rlsdk {draft.script.command} --config {name}"))  # fmt: skip


def _hardware(draft: Draft) -> str:
    found = _devices(draft)
    return f" --hardware {found}" if found else ""


def _devices(draft: Draft) -> str | None:
    nodes, each = (draft.fields.get(f"placement.{name}", 1) for name in ("num_nodes", "devices_per_node"))
    return f"h100:{nodes}x{each}" if nodes * each > 1 else None


def _plan(draft: Draft, file: Path, hardware: str | None) -> None:
    """What the command of this training checks before it takes a device; for reinforcement learning, the plan."""
    hardware = hardware or _devices(draft)
    if draft.script.command == "train":
        from rlsdk.cli.preparation.plan import run as plan

        print(f"\nrlsdk plan --config {file}" + (f" --hardware {hardware}" if hardware else ""))
        plan(["--config", str(file)], hardware=hardware, calibration=None, as_json=False)
        return
    training = Training(draft.script.command)
    found = resolve(Settings(files=[file]), training, device="cuda" if hardware else None, loads_models=False)
    for text in found.notices:
        print(printable(text), file=sys.stderr)
    print(printable(f"\nchecked: `rlsdk {draft.script.command} --config {file}` can start"))
