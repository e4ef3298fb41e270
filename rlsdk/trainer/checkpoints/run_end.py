"""Whether a run is still being written to, and the record of how it ended."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path

from rlsdk.system.atomic import atomic_write_text
from rlsdk.trainer.checkpoints.run_folder import END_FILE, HISTORY_FILE


def is_locked(run_dir: Path) -> bool | None:
    """Whether a process of this machine holds the lock of a run's folder. It is not asked for, which could keep a run
    from starting. None: the system does not say."""
    try:
        inode = (run_dir / ".lock").stat().st_ino
        lines = Path("/proc/locks").read_text().splitlines()
    except FileNotFoundError:
        return False if Path("/proc/locks").exists() else None
    except OSError:
        return None
    places = (line.split() for line in lines if " FLOCK " in line and "->" not in line)
    return any(len(parts) > 5 and parts[5].rpartition(":")[2] == str(inode) for parts in places)


def record_end(run_dir: Path, state: str, why: str = "") -> None:
    """Records how an accepted run ended; a folder that cannot be written to is left as it is.

    Args:
        run_dir: the run's folder, whose lock this process holds.
        state: finished, stopped or failed.
        why: one line; empty if there is nothing to say.
    """
    if (run_dir / HISTORY_FILE).exists():
        line = {"state": state, "why": why, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        with suppress(OSError):
            atomic_write_text(run_dir / END_FILE, json.dumps(line) + "\n")
