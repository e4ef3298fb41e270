"""Grading as samples finish: many submissions at once give what one call for all gives."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from rlsdk.interfaces import ConfigError, DataError
from rlsdk.rewards import RewardDef, RewardLimits, RewardResult, RewardRunner
from rlsdk.rewards.grading.process import GradingProcess
from rlsdk.rewards.grading.protocol import Record

from .conftest import Start, sample


def check_equal(one: RewardResult, other: RewardResult) -> None:
    assert one.scores.tolist() == other.scores.tolist()
    assert one.valid.tolist() == other.valid.tolist()
    assert one.failures == other.failures
    assert one.examples == other.examples
    for name in one.by_reward:
        assert one.by_reward[name].tolist() == other.by_reward[name].tolist()
        assert one.graded[name].tolist() == other.graded[name].tolist()


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("cut", [1, 3, 8])
def test_any_cut_gives_the_same_results_sample_by_sample(start: Start, workers: int, cut: int) -> None:
    responses = [["fine", "true", "raise", "fine", "none", "os_exit", "fine"][at % 7] for at in range(41)]
    samples = [sample(response) for response in responses]
    runner = start("misbehave", "length", "all_lengths", num_workers=workers)
    whole = runner.score(samples)
    futures = [runner.submit(samples[at : at + cut]) for at in range(0, len(samples), cut)]
    check_equal(RewardResult.concat([future.result() for future in futures]), whole)
    assert whole.scores.dtype == np.float64


def test_a_batched_reward_gets_what_was_submitted_together(start: Start) -> None:
    runner = start("group_size", num_workers=2)
    futures = [runner.submit([sample("a")] * size) for size in (1, 2, 5, 0, 3)]
    assert [future.result().scores.tolist() for future in futures] == [[1.0], [2.0] * 2, [5.0] * 5, [], [3.0] * 3]


def test_many_threads_submit_at_once(start: Start) -> None:
    runner = start("length", num_workers=2)
    failed = list[object]()

    def work(size: int) -> None:
        for count in range(10):
            got = runner.score([sample("x" * (size + count))] * 3).scores.tolist()
            if got != [size + count] * 3:
                failed.append(got)

    threads = [threading.Thread(target=work, args=(size,)) for size in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_a_small_submission_does_not_wait_for_a_large_one(start: Start) -> None:
    runner = start("slow")
    runner.score([sample("a")] * 5)
    large = runner.submit([sample("a")] * 2000)
    time.sleep(0.1)
    assert runner.submit([sample("abc")]).result().scores.tolist() == [3.0]
    assert not large.done()
    large.cancel()


def test_cancelling_frees_the_processes_and_close_cancels(start: Start) -> None:
    runner = start("misbehave", limits=RewardLimits(timeout_s=60))
    runner.wait_ready()
    hanging = runner.submit([sample("sleep")])
    time.sleep(0.3)
    assert hanging.cancel()
    assert runner.submit([sample("fine")]).result(timeout=30).scores.tolist() == [0.5]
    waiting = [runner.submit([sample("sleep")]) for _ in range(3)]
    runner.close()
    for future in waiting:
        with pytest.raises(CancelledError):
            future.result(timeout=30)
    assert runner.score([sample("fine")]).scores.tolist() == [0.5]


def test_submissions_hear_of_a_reward_that_cannot_be_loaded(start: Start) -> None:
    runner = start("lenght")
    futures = [runner.submit([sample("a")]) for _ in range(3)]
    for future in futures:
        with pytest.raises((ConfigError, CancelledError), match=r"did you mean 'length'|^$"):
            future.result(timeout=60)
    with pytest.raises(ConfigError, match="did you mean 'length'"):
        runner.wait_ready()
    with pytest.raises(DataError, match="field 'image'"):
        start("length").submit([sample("a", row={"image": b"x"})])


def test_small_submissions_are_cheap(start: Start) -> None:
    """CPU seconds of this process, dispatcher included; a bound five times what was measured."""
    runner = start("length", num_workers=2)
    samples = [sample("x" * at, row={"question": "q" * 500, "n": at}) for at in range(8)]
    runner.score(samples)
    before = time.process_time()
    for future in [runner.submit(samples) for _ in range(64)]:
        future.result()
    assert (time.process_time() - before) / 64 < 0.005


def test_a_row_that_one_reward_changes_is_changed_for_nobody_else(start: Start) -> None:
    row: dict[str, list[int]] = {"deep": []}
    result = start("changes_the_row", "misbehave").score([sample("a", row=row), sample("b", row=row)])
    assert result.by_reward["changes_the_row"].tolist() == [2.0, 2.0]
    assert row == {"deep": []}


def test_a_reward_that_forks_changes_no_other_score(start: Start) -> None:
    runner = start("forks")
    responses = ["fork", "ab", "fork", "abc", "abcd"]
    for _ in range(5):
        result = runner.score([sample(response) for response in responses])
        assert result.valid.all()
        assert result.scores.tolist() == [float(len(response)) for response in responses]


def test_a_record_that_another_writes_is_nobodys_score(start: Start) -> None:
    """Bytes in the channel that do not carry the task's nonce cost the sample whose function wrote them."""
    responses = ["a", "forge", "abc", "abcd"]
    result = start("writes_everywhere").score([sample(response) for response in responses])
    assert result.valid.tolist() == [True, False, True, True]
    assert result.scores.tolist() == [1.0, 0.0, 3.0, 4.0]
    assert result.failures == {"crash": 1}


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGSTOP"])
def test_a_sample_whose_grader_was_killed_or_stopped_is_graded_again(start: Start, tmp_path: Path, name: str) -> None:
    responses = ["a", name, "abc"]
    samples = [sample(response, prompt=str(tmp_path / "note")) for response in responses]
    result = start("dies_once").score(samples)
    assert result.valid.all()
    assert result.scores.tolist() == [1.0, float(len(name)), 3.0]
    assert not result.failures
    (notice,) = [notice for notice in result.notices if "again" in notice]
    assert "sample 1 is graded again with 'dies_once' (attempt 2)" in notice


def edits(result: RewardResult) -> list[str]:
    return [notice for notice in result.notices if "changed while in use" in notice]


def test_a_reward_file_that_is_edited_during_the_run_is_named_once(tmp_path: Path) -> None:
    (tmp_path / "factor.py").write_text("FACTOR = 1.0\n")
    file = tmp_path / "own.py"
    file.write_text("from factor import FACTOR\ndef score(sample): return FACTOR * len(sample.response)\n")
    reward = RewardDef(name="own", target=f"{file}:score")
    with closing(RewardRunner([reward], RewardLimits(), num_workers=1)) as runner:
        assert edits(runner.score([sample("ab")])) == []
        (first,) = runner.pids
        os.kill(first, signal.SIGKILL)
        assert edits(runner.score([sample("ab")])) == []  # the same content
        (tmp_path / "factor.py").write_text("FACTOR = 2.50\n")
        (second,) = runner.pids
        os.kill(second, signal.SIGKILL)
        found = runner.score([sample("ab")])
        assert found.scores.tolist() == [5.0]
        (said,) = edits(found)
        assert said.startswith(f"warning: {str(tmp_path / 'factor.py')!r} changed while in use")
        assert edits(runner.score([sample("ab")])) == []


def test_graders_that_are_killed_from_outside_change_no_number(start: Start) -> None:
    runner = start("slow", num_workers=2)
    runner.wait_ready()
    future = runner.submit([sample("x" * at) for at in range(40)])
    for sent in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM):
        time.sleep(0.3)
        os.kill(runner.pids[0], sent)
    result = future.result(timeout=60)
    assert result.valid.all()
    assert result.scores.tolist() == [float(at) for at in range(40)]
    assert len(result.notices) >= 2


def test_records_of_a_fast_function_are_read_many_at_a_time(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process writes each record as it is made, so that what it was at is known when it dies; the controller must not
    wake up for every one."""
    reads = 0
    read = GradingProcess.read

    def counted(process: GradingProcess) -> Iterator[Record]:
        nonlocal reads
        reads += 1
        return read(process)

    monkeypatch.setattr(GradingProcess, "read", counted)
    monkeypatch.setattr("rlsdk.rewards.grading.dispatch._PAUSE_S", 1.0)  # so that 50 ms are fast
    runner = start("slow")
    assert runner.score([sample("x")] * 20).valid.all()
    assert reads <= 15
