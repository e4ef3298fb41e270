"""Ends of processes in words, also those by signals without a name."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from rlsdk.system.exit_codes import describe_exit, signal_name


@pytest.mark.parametrize(
    ("code", "said"), [(0, "exit code 0"), (3, "exit code 3"), (-11, "signal SIGSEGV"), (-40, "signal 40")]
)
def test_an_exit_code_in_words(code: int, said: str) -> None:
    assert describe_exit(code) == said


def test_every_signal_has_a_text() -> None:
    assert all(signal_name(number) for number in range(1, signal.SIGRTMAX + 1))
    assert signal_name(9) == "SIGKILL"
    assert signal_name(40) == "signal 40"


def test_a_process_that_a_real_time_signal_ends() -> None:
    done = subprocess.run([sys.executable, "-c", "import os; os.kill(os.getpid(), 40)"], check=False)
    assert describe_exit(done.returncode) == "signal 40"
