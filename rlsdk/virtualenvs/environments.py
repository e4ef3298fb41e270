"""The folder with the environments of plugins: which are ours, who uses them, and what an interrupted install left."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlsdk.cluster.ray_cluster.watchdog import MARK, RayWatchdog
from rlsdk.interfaces import PluginError
from rlsdk.registry import IsolatedPlugin, home, read_record, record_path
from rlsdk.system.files import remove_tree

_CLEAR_TIMEOUT_S = 60.0


def users_of(environment: Path) -> list[int]:
    """Returns the process ids on this node that run an environment's interpreter."""
    import psutil

    prefix, found = f"{environment}{os.sep}", []
    for process in psutil.process_iter(["cmdline"]):
        if any(part.startswith(prefix) for part in (process.info["cmdline"] or ())[:1]):
            found.append(process.pid)
    return found


def current_record(distribution: str) -> IsolatedPlugin | None:
    """Returns the current record; None if there is none, or it cannot be read."""
    try:
        return read_record(record_path(distribution))
    except (OSError, ValueError, TypeError):
        return None


def own_environment(record: IsolatedPlugin | None) -> Path | None:
    """The environment that was made for a plugin; None if others made it. A record may have been edited: nothing but a
    folder directly in `environments_folder()` is ours."""
    if record is None or not record.owned:
        return None
    folder = Path(record.environment)
    stands_here = folder.parent == environments_folder() and folder.name not in ("", ".", "..")
    return folder if stands_here and folder.is_dir() and not folder.is_symlink() else None


def environments_folder() -> Path:
    return home() / "environments"


@contextmanager
def lock_plugin(distribution: str) -> Iterator[None]:
    """Holds a lock on a plugin's environment. Raises `PluginError` if another process has it."""
    environments_folder().mkdir(parents=True, exist_ok=True)
    with (environments_folder() / f".{distribution}.lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise PluginError(f"another process is installing or removing {distribution}; wait for it") from error
        yield


@contextmanager
def remove_on_failure(folder: Path) -> Iterator[None]:
    """On failure, ends installers that were started inside, and removes their files.

    A watchdog process does the same if this program is killed.
    """
    watchdog = RayWatchdog(str(folder))
    os.environ[MARK] = str(folder)
    try:
        yield
    except BaseException:
        watchdog.end(_CLEAR_TIMEOUT_S)
        remove_tree(environments_folder(), folder)
        raise
    else:
        watchdog.release(_CLEAR_TIMEOUT_S)
    finally:
        del os.environ[MARK]


def clear_leftovers(distribution: str) -> None:
    """Removes environments of this plugin that no record names and no process uses."""
    previous = current_record(distribution)
    kept = Path(previous.environment) if previous else None
    for folder in environments_folder().glob(f"{distribution}-????????"):
        if folder != kept and folder.is_dir() and not folder.is_symlink() and not users_of(folder):
            remove_tree(environments_folder(), folder)


def num_bytes(folder: Path) -> int:
    """Returns the total size of the files in a folder."""
    return sum(os.lstat(os.path.join(path, name)).st_size for path, _, names in os.walk(folder) for name in names)
