"""Prints the error that ends a command, and determines its exit code."""

from __future__ import annotations

import errno
import os
import shlex
import sys
import traceback

from rlsdk.interfaces import (
    CheckpointError,
    ConfigError,
    DataError,
    PlacementError,
    PluginError,
    RlsdkError,
    UnsupportedCapabilityError,
)
from rlsdk.system.printable import printable

TRACEBACK_FLAG = "--traceback"
TRACEBACK_VARIABLE = "RLSDK_TRACEBACK"
EXIT_REFUSED = 2
EXIT_FAILURE = 1
BEGUN = "the run had begun"
"""Note on an error that ended a run after its first step had begun; its exit code is 1 for every type of error."""
_REFUSALS = (CheckpointError, ConfigError, DataError, PlacementError, PluginError, UnsupportedCapabilityError)
"""Errors in an input of a command: a field, a file, a plugin, a checkpoint to resume from, devices."""
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_MISPLACED = (errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EISDIR)


def explain(error: Exception, *, wants_traceback: bool) -> int | None:
    """Prints the error; returns the exit code, or None for an unexpected error that needs a traceback.

    2: an input of the command is invalid, and no step was made. 1: any other failure.
    """
    if isinstance(error, OSError) and not isinstance(error, RlsdkError):
        if wants_traceback or error.filename is None:
            return None
        print(f"error: {printable(_file_error(error))}", file=sys.stderr)
        return _code_of(error)
    if not isinstance(error, RlsdkError):
        return None
    if wants_traceback:
        print(printable("".join(traceback.format_exception(error))), file=sys.stderr)
    print(f"error: {printable(str(error))}", file=sys.stderr)
    # Messages about the user's input are complete; only other errors may need a traceback.
    if error.__cause__ is not None and not wants_traceback and not isinstance(error, ConfigError | DataError):
        print(f"({TRACEBACK_VARIABLE}=1 shows where it came from)", file=sys.stderr)
    return _code_of(error)


def _code_of(error: Exception) -> int:
    if BEGUN in getattr(error, "__notes__", ()):
        return EXIT_FAILURE
    is_path = isinstance(error, OSError) and error.errno in (*_DENIED, *_MISPLACED)
    return EXIT_REFUSED if is_path or isinstance(error, _REFUSALS) else EXIT_FAILURE


def _file_error(error: OSError) -> str:
    """Describes a file that cannot be read or written, and what to do about it."""
    path = str(error.filename)
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
        hint = f"({TRACEBACK_VARIABLE}=1 shows where it came from)"
    return f"{path!r}: {error.strerror}; {hint}"
