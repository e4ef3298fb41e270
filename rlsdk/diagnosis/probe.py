"""Runs code in a separate process, so that an import that hangs, crashes or aborts ends there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlsdk.system.exit_codes import signal_name

MARK = "rlsdk-doctor:"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer of the process."""

    facts: Mapping[str, Any] | None = None
    """Its facts; None: it ended before it answered."""
    error: str = ""
    """The error, in one line."""


def ask(code: str, *arguments: str, timeout_s: float, python: str = sys.executable) -> Answer:
    """Runs `code`, which must call `answer(**facts)`, under this interpreter and environment."""
    prelude = f"import json, sys\ndef answer(**facts):\n    print({MARK!r} + json.dumps(facts), flush=True)\n"
    try:
        done = subprocess.run(
            [python, "-P", "-c", prelude + code, *arguments], capture_output=True, text=True, timeout=timeout_s,
            errors="replace", stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Answer(error=f"no answer within {timeout_s:g} s")
    except OSError as error:
        return Answer(error=f"{type(error).__name__}: {error}")
    said = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if said:
        return Answer(facts=json.loads(said[-1]))
    if done.returncode < 0:
        return Answer(error=f"its process died of {signal_name(-done.returncode)}")
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return Answer(error=lines[-1] if lines else f"its process ended with code {done.returncode} and said nothing")
