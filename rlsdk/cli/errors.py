"""Prints the error that ends a command, and determines its exit code."""

from __future__ import annotations

import errno
import os
import shlex
import sys
import traceback
from contextlib import suppress

from rlsdk.cli import tracebacks
from rlsdk.interfaces import (
    CheckpointError,
    ConfigError,
    DataError,
    PlacementError,
    PluginError,
    RlsdkError,
    UnsupportedCapabilityError,
)
from rlsdk.system.files import UnfitFileError
from rlsdk.system.printable import ERROR_CHARS, printable
from rlsdk.system.streams import STDERR, STDOUT

EXIT_REFUSED = 2
EXIT_FAILURE = 1
BEGUN = "the run had begun"
"""Note on an error that ended a run after its first step had begun; its exit code is 1 for every type of error."""
_REFUSALS = (CheckpointError, ConfigError, DataError, PlacementError, PluginError, UnsupportedCapabilityError)
"""Errors in an input of a command: a field, a file, a plugin, a checkpoint to resume from, devices."""
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_MISPLACED = (errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EISDIR)


def explain(error: Exception, *, wants_traceback: bool) -> int:
    """Prints the error; returns the exit code.

    2: an input of the command is invalid, and no step was made. 1: any other failure.
    """
    if isinstance(error, BrokenPipeError) and error.filename == STDOUT and BEGUN not in _notes(error):
        return EXIT_FAILURE  # whoever read the output has seen enough
    of_file = isinstance(error, OSError) and not isinstance(error, RlsdkError) and error.filename is not None
    is_known = of_file or isinstance(error, RlsdkError)
    if wants_traceback or not is_known:
        _say("".join(traceback.format_exception(error)).rstrip("\n"))
    if not is_known:
        return EXIT_FAILURE
    said = _file_error(error) if of_file and isinstance(error, OSError) else str(error)
    _say(f"error: {said}")
    # Messages about the user's input are complete; only other errors may need a traceback.
    if error.__cause__ is not None and not wants_traceback and not isinstance(error, ConfigError | DataError | OSError):
        _say(f"({tracebacks.VARIABLE}=1 shows where it came from)")
    return _code_of(error)


def _say(text: str) -> None:
    """Prints to standard error, if it can be written."""
    if sys.stderr is not None:
        with suppress(OSError):
            print(printable(text, ERROR_CHARS), file=sys.stderr)


def _notes(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", ()))


def _code_of(error: Exception) -> int:
    if BEGUN in _notes(error):
        return EXIT_FAILURE
    is_path = isinstance(error, UnfitFileError) or (
        isinstance(error, OSError) and error.errno in (*_DENIED, *_MISPLACED) and error.filename not in (STDOUT, STDERR)
    )
    return EXIT_REFUSED if is_path or isinstance(error, _REFUSALS) else EXIT_FAILURE


def _file_error(error: OSError) -> str:
    """Describes a file that cannot be read or written, and what to do about it."""
    path = str(error.filename)
    if path in (STDOUT, STDERR):
        again = "; `rlsdk train --resume RUN` goes on from the last checkpoint" if BEGUN in _notes(error) else ""
        hint = "what the command printed is not complete: free disk space, or send it to another place"
        return f"{path}: {error.strerror}; {hint}{again}"
    if isinstance(error, UnfitFileError):
        return f"{path!r}: {error.strerror}"
    if error.errno in _DENIED:
        hint = f"this user has no permission: choose another folder, or see `ls -ld {shlex.quote(path)}`"
    elif error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = f"free disk space: `df -h {shlex.quote(os.path.dirname(path) or '.')}`"
    elif error.errno == errno.EISDIR:
        hint = "this is a folder, but a file is needed: choose another path"
    elif error.errno == errno.ENOENT:
        hint = "the file or its folder does not exist: check the path"
    elif error.errno in _MISPLACED:
        hint = "this is a file, but a folder is needed: choose another path"
    else:
        hint = f"({tracebacks.VARIABLE}=1 shows where it came from)"
    return f"{path!r}: {error.strerror}; {hint}"
