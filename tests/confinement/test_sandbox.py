"""The room by itself: a process without rights for a program, and what this machine can take away."""

from __future__ import annotations

import sys

import pytest

from rlsdk.confinement.measures import probe
from rlsdk.confinement.sandbox import Limits, run_io, run_tests

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux confines processes")
LIMITS = Limits(seconds=20.0, memory_mb=512)
OUTSIDE = """
import socket
for attempt in (lambda: socket.socket(), lambda: open("/etc/hosts", "a"), lambda: open("note", "w").write("x")):
    try:
        attempt()
        print("allowed")
    except OSError as error:
        print("refused")
"""


@LINUX
def test_a_program_reads_its_input_and_writes_to_its_own_folder_only() -> None:
    outcome = run_io("print(input()[::-1])", "abc\n", LIMITS, LIMITS.seconds)
    assert (outcome.exit_code, outcome.output) == (0, "cba\n")
    outcome = run_io(OUTSIDE, "", LIMITS, LIMITS.seconds)
    assert (outcome.exit_code, outcome.output.split()) == (0, ["refused", "refused", "allowed"])


@LINUX
def test_a_program_that_does_not_end_is_killed() -> None:
    assert run_io("while True: pass", "", LIMITS, 0.5).exit_code < 0


@LINUX
def test_tests_run_in_the_process_of_the_program() -> None:
    outcome = run_tests("def f(x): return x + 1", "", [("value", "f(1)"), ("test", "assert f(1) == 3")], "n", LIMITS)
    first, second = outcome.results
    assert first == {"at": 0, "value": {"int": "2"}}
    assert second == {"at": 1, "error": "AssertionError"}


def test_each_measure_is_in_force_or_named_as_missing() -> None:
    confinement = probe()
    assert confinement.held
    assert set(confinement.held).isdisjoint(confinement.missing)
