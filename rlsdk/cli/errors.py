"""What a command says of an error that ends it, and the exit code that it leaves with."""

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
from rlsdk.kit.printable import printable

TRACEBACK_FLAG = "--traceback"
TRACEBACK_VARIABLE = "RLSDK_TRACEBACK"
EXIT_REFUSED = 2
EXIT_FAILURE = 1
BEGUN = "the run had begun"
"""Note of an error that ended a run after its first step had begun: whatever it is, it is no refusal."""
_REFUSALS = (CheckpointError, ConfigError, DataError, PlacementError, PluginError, UnsupportedCapabilityError)
"""Errors in what a command was given: a field, a file, a plugin, a checkpoint to resume from, devices."""
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_MISPLACED = (errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EISDIR)


def explain(error: Exception, *, wants_traceback: bool) -> int | None:
    """Prints what is wrong; returns the exit code, or None for an error that is nobody's mistake and needs a traceback.

    2: something that the command was given cannot be used, and no step was made. 1: anything else.
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
    # What a person typed or wrote is said in full; only what came from deeper down needs a trace.
    if error.__cause__ is not None and not wants_traceback and not isinstance(error, ConfigError | DataError):
        print(f"({TRACEBACK_VARIABLE}=1 shows where it came from)", file=sys.stderr)
    return _code_of(error)


def _code_of(error: Exception) -> int:
    if BEGUN in getattr(error, "__notes__", ()):
        return EXIT_FAILURE
    is_path = isinstance(error, OSError) and error.errno in (*_DENIED, *_MISPLACED)
    return EXIT_REFUSED if is_path or isinstance(error, _REFUSALS) else EXIT_FAILURE


def _file_error(error: OSError) -> str:
    """A file that cannot be read or written, and what to do about it."""
    path = str(error.filename)
    if error.errno in _DENIED:
        hint = f"this user may not use it: choose another folder, or see `ls -ld {shlex.quote(path)}`"
    elif error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = f"make room: `df -h {shlex.quote(os.path.dirname(path) or '.')}`"
    elif error.errno == errno.EISDIR:
        hint = "a folder stands where a file is needed: choose another path"
    elif error.errno == errno.ENOENT:
        hint = "it is not there, or its folder is not: check the path"
    elif error.errno in _MISPLACED:
        hint = "a file stands where a folder is needed: choose another path"
    else:
        hint = f"({TRACEBACK_VARIABLE}=1 shows where it came from)"
    return f"{path!r}: {error.strerror}; {hint}"
