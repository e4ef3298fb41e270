"""The command line: `rlsdk COMMAND ...`."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from rlsdk.cli import tracebacks
from rlsdk.system.import_path import leave_current_folder

EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line, and ends the process with its exit code.

    0: success. 2: an input of the command is invalid, and nothing was started. 130: Ctrl-C. 1: any other failure.
    """
    is_process = arguments is None
    if is_process:
        leave_current_folder()
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    code: str | int | None = 0
    try:  # includes all imports: Ctrl-C may come while this program is loading
        _run(arguments)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except SystemExit as left:
        code = left.code
    if is_process:
        atexit.register(_close_output)  # the last to register is the first to run
    _leave(code)


def _close_output() -> None:
    """What a stranger's code prints while Python ends is no output of the command."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
    with suppress(OSError):
        os.dup2(2, 1)


def _run(arguments: Sequence[str]) -> None:
    from rlsdk.system.streams import safe_streams

    wants_traceback = tracebacks.FLAG in arguments or os.environ.get(tracebacks.VARIABLE, "0") not in ("", "0")
    arguments = [argument for argument in arguments if argument != tracebacks.FLAG]
    code: str | int | None = None
    try:
        with safe_streams():
            try:
                from rlsdk.cli.commands import app

                app(args=arguments or ["--help"], prog_name="rlsdk")
            except SystemExit as left:
                code = left.code
            except Exception as error:
                code = _explain(error, wants_traceback=wants_traceback)
    except OSError as error:  # of the streams themselves
        code = code or _explain(error, wants_traceback=wants_traceback)
    sys.exit(code)


def _explain(error: Exception, *, wants_traceback: bool) -> int:
    from rlsdk.cli.errors import explain  # needs the interfaces' errors, which `--help` does not

    return explain(error, wants_traceback=wants_traceback)


def _leave(code: str | int | None) -> NoReturn:
    """Ends the process.

    If threads of an interrupted start are still running, it skips Python's own shutdown, which would wait for them.
    Ray's processes and grading processes end with this one in every case.
    """
    interrupts = sys.modules.get("rlsdk.system.interrupts")
    if interrupts is not None and interrupts.has_abandoned() and not isinstance(code, str):
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(code or 0)
    sys.exit(code)
