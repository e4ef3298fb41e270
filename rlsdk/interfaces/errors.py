"""The error tree. Every error says what was requested, what is wrong, and what to do next.

All of them can be pickled (they cross processes), and each also inherits from the built-in class that a caller who does
not know rlsdk would catch.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

MOST_NAMES = 5
"""Of files that a message lists."""


class RlsdkError(Exception):
    """Base of every error that rlsdk raises on purpose."""


class ConfigError(RlsdkError, ValueError):
    """A field of the configuration cannot be used: names its path, its value and what was expected."""

    problems: Sequence[Any] = ()
    """The fields as data (`rlsdk.config.Problem`), where the error is about fields."""


class PluginError(RlsdkError):
    """Base of all plugin errors."""


class PluginNotFoundError(PluginError, LookupError):
    """No installed plugin provides the requested name."""


class PluginLoadError(PluginError, ImportError):
    """A plugin is installed but cannot be used: its import failed, or it returned something invalid."""


class DuplicatePluginError(PluginError):
    """Two distributions claim one name."""


class InterfaceVersionError(PluginError):
    """A plugin was written for an interface version that this rlsdk does not serve."""


class UnsupportedCapabilityError(RlsdkError, NotImplementedError):
    """A backend was asked for something that it does not claim to do."""


class BatchError(RlsdkError, ValueError):
    """A batch does not fit the schema: names the tensor, the shape it has and the shape expected."""


class LayoutError(RlsdkError, ValueError):
    """Two weight layouts cannot be matched, or a layout contradicts itself."""


class WeightSyncError(RlsdkError, RuntimeError):
    """There is no proof that the rollout engine serves the weights it was sent. Never ignore this error."""


class PlacementError(RlsdkError, RuntimeError):
    """The cluster lacks resources that the run needs: lists required and available ones, node by node."""


class WorkerError(RlsdkError, RuntimeError):
    """A worker process failed or died: names role, rank and node, with the last lines of its log."""


class DeadlineError(WorkerError, TimeoutError):
    """A wait on another process passed its deadline."""


class CheckpointError(RlsdkError, RuntimeError):
    """A checkpoint cannot be written, or the requested one is incomplete."""


class DataError(RlsdkError, ValueError):
    """A row of data cannot be used: names the file and the line."""


class ParityError(RlsdkError, RuntimeError):
    """Train and rollout engine disagree on log-probs by more than the run allows."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """Returns ``"; did you mean 'x'?"`` for the closest of `valid`, or an empty string when none is close."""
    close = closest(name, valid)
    return f"; did you mean {close!r}?" if close else ""


def closest(name: str, valid: Iterable[str]) -> str | None:
    """The closest of `valid`; None when none is close."""
    matches = difflib.get_close_matches(name, list(valid), n=3, cutoff=0.6)
    # Among equally close names, prefer one with the same letters: two of them were swapped.
    matches.sort(key=lambda other: sorted(other) != sorted(name))
    return matches[0] if matches else None


def nearest_file(path: Path, suffixes: Collection[str]) -> tuple[str, bool]:
    """Says what is there where a file is not: the nearest name in its folder, else the files of its kind.

    Args:
        path: of the file that does not exist.
        suffixes: of files of its kind, in lower case: `.py`.

    Returns:
        The end of a message, which begins with ``"; "``; and whether it names what was probably meant.

    Raises:
        OSError: a folder on the way cannot be listed.
    """
    folder = path.parent
    if not folder.is_dir():
        first = next(part for part in (folder, *folder.parents) if part.parent.is_dir())
        close = nearest(first.name, [entry.name for entry in first.parent.iterdir() if entry.is_dir()])
        return f"; the folder {str(first)!r} does not exist either{close}", bool(close)
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    of_kind = [name for name in names if Path(name).suffix.lower() in suffixes]
    if close := nearest(path.name, of_kind) or nearest(path.name, names):
        return close, True
    more = f" and {len(of_kind) - MOST_NAMES} more" if len(of_kind) > MOST_NAMES else ""
    where = "this folder" if folder in (Path(), Path.cwd()) else repr(str(folder))
    have = ", ".join(of_kind[:MOST_NAMES]) or f"no file that ends in {' or '.join(suffixes)}"
    return f"; {where} has {have}{more}", False
