"""What a terminal says of a run's time and memory."""

from __future__ import annotations

import io
import math
import os

import numpy as np
import pytest
from rich.console import Console

from rlsdk.config import RunConfig
from rlsdk.system.quantities import duration
from rlsdk.views.console import HEADER_EVERY, ConsoleView
from rlsdk.views.figures import eval_lines, gains
from rlsdk.views.summary import Totals, memory_of_processes

STEP = {"time/step_s": 4.0, "time/rollout_s": 2.0, "time/update_s": 1.5, "time/other_s": 0.499, "time/sync_s": 0.001,
        "throughput/tokens_per_s": 1000.0, "time/wait_prev_gen_s": 9.0, "time/eval_s": 60.0}  # fmt: skip


def test_the_end_says_throughput_time_by_phase_and_memory() -> None:
    text = io.StringIO()
    with ConsoleView(Console(file=text, width=200)) as view:
        for step in range(1, 4):
            view.step(step, 3, STEP | {"throughput/tokens_per_s": 1000.0 * step})
    lines = text.getvalue().splitlines()[-3:]
    assert lines[0] == "3 steps, 4.00 s each, 2,000 tokens/s"
    assert (
        lines[1] == "time by phase: rollout 50%, update 38%, other 12%"
    )  # beside the phases: neither waiting nor eval
    assert lines[2].startswith("main memory: ")
    assert max(map(len, lines)) <= 80


def test_a_run_that_failed_or_had_no_step_has_no_summary() -> None:
    text = io.StringIO()
    with ConsoleView(Console(file=text, width=200)):
        pass
    assert text.getvalue() == ""
    view = ConsoleView(Console(file=text, width=200))
    view.step(1, 3, STEP)
    view.__exit__(ValueError, ValueError("x"), None)
    assert "time by phase" not in text.getvalue()


def test_the_time_that_is_left_follows_the_newest_steps() -> None:
    text = io.StringIO()
    with ConsoleView(Console(file=text, width=200)) as view:
        for step in range(1, HEADER_EVERY + 2):
            view.step(step, 100, STEP | {"time/step_s": 10.0 if step <= 6 else 2.0})
    [line] = [line for line in text.getvalue().splitlines() if " left" in line]
    # 26 steps are done; those before the newest 20 were slow and are forgotten
    assert line == "1 min 40 s in steps so far, about 2 min 30 s for the 75 that are left"
    assert Totals().left(5) == ""


def test_steps_whose_samples_come_from_the_journal_promise_nothing() -> None:
    """After a resume, a step takes as long as its update; how long a whole step takes is known after the next."""
    totals = Totals()
    fast = STEP | {"time/step_s": 1.0, "time/rollout_s": 0.0, "time/update_s": 1.0, "throughput/reused_samples": 8.0}
    totals.step(fast)
    assert totals.left(5) == ""
    assert next(line for line in totals.lines() if line) == "1 step, 1.00 s each"
    totals.step(STEP)
    assert totals.left(5) == "5.0 s in steps so far, about 20 s for the 5 that are left"
    assert next(line for line in totals.lines() if line) == "2 steps, 2.50 s each, 1,000 tokens/s"


def test_many_phases_are_wrapped_at_80_columns() -> None:
    totals = Totals()
    totals.step({"time/step_s": 10.0} | {f"time/a_long_phase_name_{at}_s": 1.0 for at in range(10)})
    lines = list(totals.lines())
    assert max(map(len, lines)) <= 80
    assert "".join(lines).count("a long phase name") == 10


def test_memory_is_that_of_all_processes_with_shared_pages_once() -> None:
    before = memory_of_processes()
    block = np.ones(64 << 20, np.uint8)
    grown = memory_of_processes() - before
    assert 0.9 * block.nbytes < grown < 1.5 * block.nbytes
    to_read, to_write = os.pipe()
    child = os.fork()
    if not child:
        os.read(to_read, 1)
        os._exit(0)
    both = memory_of_processes() - before
    os.write(to_write, b"x")
    os.waitpid(child, 0)
    assert both < 1.6 * block.nbytes  # the child shares the block


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0.0 s"), (9.94, "9.9 s"), (45.4, "45 s"), (59.6, "1 min 0 s"), (725, "12 min 5 s"), (12_000, "3 h 20 min")],
)
def test_durations_read_as_people_say_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("norms", "warns"), [([0.0, 0.0], True), ([0.0, 1.5], False), ([], False)])
def test_the_end_says_where_no_step_had_a_gradient(norms: list[float], warns: bool) -> None:
    totals = Totals()
    for norm in norms:
        totals.step(STEP | {"policy/grad_norm": norm})
    totals.step(STEP)
    assert any("no step had a gradient" in line for line in totals.lines()) is warns


def test_an_accuracy_that_no_reward_can_tell_is_a_dash_and_the_reward_stands_for_it() -> None:
    before, after = (
        {"eval/accuracy_greedy": math.nan, "eval/reward_greedy": reward, "eval/tokens_greedy": 6.0}
        for reward in (0.5, 0.75)
    )
    (line,) = eval_lines(2, after, {"greedy": "length >= 1"})
    assert "accuracy - (several values of length >= 1: say with eval.correct_from what is right), reward 0.750" in line
    (gain,) = gains(RunConfig(), before, after)
    assert gain == "reward on held-out prompts, greedy: 0.500 before, 0.750 after (+0.250)"
