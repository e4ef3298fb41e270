"""The command line: `rlsdk COMMAND ...`."""

from __future__ import annotations

import errno
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

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
EXIT_INTERRUPTED = 130
BEGUN = "the run had begun"
"""Note of an error that ended a run after its first step had begun: whatever it is, it is no refusal."""
_REFUSALS = (CheckpointError, ConfigError, DataError, PlacementError, PluginError, UnsupportedCapabilityError)
"""Errors in what a command was given: a field, a file, a plugin, a checkpoint to resume from, devices."""
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_MISPLACED = (errno.ENOTDIR, errno.EEXIST, errno.EISDIR)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and leaves the process with its exit code.

    0: done. 2: something that the command was given cannot be used; nothing was started. 130: Ctrl-C. 1: anything else.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    wants_traceback = TRACEBACK_FLAG in arguments or os.environ.get(TRACEBACK_VARIABLE, "0") not in ("", "0")
    arguments = [argument for argument in arguments if argument != TRACEBACK_FLAG]
    try:
        from rlsdk.cli.commands import app

        app(args=arguments or ["--help"], prog_name="rlsdk")
    except KeyboardInterrupt:  # while this program is still being read
        _leave(EXIT_INTERRUPTED)
    except SystemExit as left:
        _leave(left.code)
    except OSError as error:
        if wants_traceback or error.filename is None:
            raise
        print(f"error: {printable(_file_error(error))}", file=sys.stderr)
        sys.exit(_code_of(error))
    except RlsdkError as error:
        if wants_traceback:
            print(printable(traceback.format_exc()), file=sys.stderr)
        print(f"error: {printable(str(error))}", file=sys.stderr)
        # What a person typed or wrote is said in full; only what came from deeper down needs a trace.
        if error.__cause__ is not None and not wants_traceback and not isinstance(error, ConfigError | DataError):
            print(f"({TRACEBACK_VARIABLE}=1 shows where it came from)", file=sys.stderr)
        sys.exit(_code_of(error))


def _code_of(error: RlsdkError | OSError) -> int:
    if BEGUN in getattr(error, "__notes__", ()):
        return EXIT_FAILURE
    is_path = isinstance(error, OSError) and error.errno in (*_DENIED, *_MISPLACED)
    return EXIT_REFUSED if is_path or isinstance(error, _REFUSALS) else EXIT_FAILURE


def _leave(code: str | int | None) -> NoReturn:
    """Ends the process; without Python's own end where threads are still at what an interrupted start has left: that
    would wait for them. Ray's processes and graders end with this one, however it ends."""
    leaving = sys.modules.get("rlsdk.kit.leaving")
    if leaving is not None and leaving.is_left() and not isinstance(code, str):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)
    sys.exit(code)


def _file_error(error: OSError) -> str:
    """A file that cannot be read or written, and what to do about it."""
    path = str(error.filename)
    if error.errno in _DENIED:
        hint = f"this user may not use it: choose another folder, or see `ls -ld {shlex.quote(path)}`"
    elif error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = f"make room: `df -h {shlex.quote(os.path.dirname(path) or '.')}`"
    elif error.errno == errno.EISDIR:
        hint = "a folder stands where a file is needed: choose another path"
    elif error.errno in _MISPLACED:
        hint = "a file stands where a folder is needed: choose another path"
    else:
        hint = f"({TRACEBACK_VARIABLE}=1 shows where it came from)"
    return f"{path!r}: {error.strerror}; {hint}"
