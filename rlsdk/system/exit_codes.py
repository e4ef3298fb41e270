"""How a process ended, in words."""

from __future__ import annotations

import signal


def describe_exit(code: int) -> str:
    """`exit code 3`, `signal SIGSEGV`; of a signal without a name, such as most real-time signals, its number."""
    return f"exit code {code}" if code >= 0 else f"signal {signal_name(-code).removeprefix('signal ')}"


def signal_name(number: int) -> str:
    """`SIGSEGV`, or `signal 40` if it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
