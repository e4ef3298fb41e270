"""What a page says of a run: running, finished, stopped, failed or died, and what is left of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlsdk.trainer.checkpoints.run_end import is_locked, record_end
from rlsdk.trainer.checkpoints.run_folder import END_FILE, HISTORY_FILE, run_lock
from rlsdk.views.report.live import LivePage
from rlsdk.views.report.record import read_run
from rlsdk.views.report.state import State, elapsed, state_line, state_of


@pytest.fixture
def run(tmp_path: Path) -> Path:
    lines = [{"step": step, "reward/mean": 0.5, "time/step_s": 3.0, "throughput/tokens_per_s": 100.0}
             for step in range(1, 11)]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "config.yaml").write_text("trainer: {steps: 30}\n")
    (tmp_path / HISTORY_FILE).write_text("{}\n")
    return tmp_path


def test_a_run_is_running_as_long_as_a_process_holds_its_lock(run: Path) -> None:
    page = LivePage(run)
    with run_lock(run):
        assert is_locked(run)
        found, mark = state_of(read_run(run)), page.mark
    assert (found.state, found.note) == (State.RUNNING, "10 of 30 steps, about 1 min 0 s left")
    assert not is_locked(run)
    found = state_of(read_run(run))
    assert found.state is State.DIED
    assert page.mark != mark  # a page that is open learns of it
    with run_lock(run):  # to look has taken nothing
        pass


@pytest.mark.parametrize("state", ["finished", "stopped", "failed"])
def test_the_end_of_a_run_is_recorded(run: Path, state: str) -> None:
    record_end(run, state, "a <b>reason</b>")
    found = state_of(read_run(run))
    assert (found.state, found.note) == (state, "10 of 30 steps: a <b>reason</b>")
    line = state_line(found, 12.0)
    assert "&lt;b&gt;reason" in line
    assert 'data-at="12"' in line


def test_a_folder_in_which_no_run_was_accepted_gets_no_record(run: Path) -> None:
    (run / HISTORY_FILE).unlink()
    record_end(run, "failed")
    assert not (run / END_FILE).exists()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"state": "<b>"}', '{"state": ["x"], "why": 3}', "\x00"])
def test_a_record_that_somebody_else_wrote_is_harmless(run: Path, content: str) -> None:
    (run / END_FILE).write_text(content)
    assert state_of(read_run(run)).state in (State.DIED, State.UNKNOWN)


def test_all_steps_done_is_finished_without_a_record(run: Path) -> None:
    (run / "config.yaml").write_text("trainer: {steps: 10}\n")
    assert state_of(read_run(run)).state is State.FINISHED


def test_a_warm_start_and_other_trainings_count_their_own_steps(run: Path) -> None:
    (run / "metrics.jsonl").write_text('{"step": 4, "sft/loss": 1.0, "sft/step_s": 2.0}\n')
    (run / "config.yaml").write_text("trainer: {steps: 30}\nsft: {steps: 10}\n")
    with run_lock(run):
        assert state_of(read_run(run)).note == "4 of 10 steps, about 12 s left"


def test_time_and_tokens_add_up() -> None:
    rows = [{"step": 0, "eval/accuracy": 0.1, "time/eval_s": 5.0},
            {"step": 1, "time/step_s": 2.0, "throughput/tokens_per_s": 10.0},
            {"step": 2, "time/step_s": 4.0}]  # fmt: skip
    assert elapsed(rows) == {"time": [5.0, 7.0, 11.0], "tokens": [None, 20.0, 20.0]}
    assert elapsed([{"step": 1, "reward/mean": 0.0}]) == {}
