"""Nothing stays behind: not after a time-out, not after `close`, not after kill -9 of the run."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlsdk.rewards import RewardDef, RewardLimits, RewardRunner

from .conftest import FUNCTIONS, Start, sample


def alive(pids: list[int]) -> list[int]:
    return [p for p in pids if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE]


def wait_until_gone(pids: list[int]) -> None:
    end = time.monotonic() + 20
    while alive(pids) and time.monotonic() < end:
        time.sleep(0.02)
    assert alive(pids) == []


def pids_in(path: Path, count: int) -> list[int]:
    """The process numbers that `leaves_a_child` wrote, once there are so many."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        numbers = [int(word) for word in path.read_text().split()] if path.exists() else []
        if len(numbers) >= count:
            return numbers
        time.sleep(0.02)
    raise AssertionError("the reward function never ran")


def test_a_timed_out_function_takes_its_own_children_with_it(start: Start, tmp_path: Path) -> None:
    note = tmp_path / "pids"
    runner = start("leaves_a_child", limits=RewardLimits(timeout_s=1.0, allow_writes=True))
    assert runner.score([sample("hang", prompt=str(note))]).failures == {"timeout": 1}
    wait_until_gone(pids_in(note, 2))


def test_close_and_the_end_of_the_runner_end_everything(start: Start, tmp_path: Path) -> None:
    note = tmp_path / "pids"
    runner = start("leaves_a_child")
    runner.score([sample("go", prompt=str(note))])
    pids = pids_in(note, 2)
    assert len(alive(pids)) == 2
    runner.close()
    wait_until_gone(pids)
    runner.close()
    assert runner.score([sample("go", prompt=str(note))]).scores.tolist() == [1.0]


@pytest.mark.parametrize("doing", ["idle", "hang"])
def test_kill_minus_nine_of_the_run_leaves_no_orphan(tmp_path: Path, doing: str) -> None:
    """Also while the function is inside one long C call that holds the interpreter lock."""
    note = tmp_path / "pids"
    code = textwrap.dedent(f"""
        import time
        from rlsdk.interfaces import RewardSample
        from rlsdk.rewards import RewardDef, RewardLimits, RewardRunner
        rewards = [RewardDef(name="a", target={f"{FUNCTIONS}:leaves_a_child"!r})]
        runner = RewardRunner(rewards, RewardLimits(timeout_s=300, allow_writes=True))
        row = dict(prompt={str(note)!r}, answer=None, row={{}}, truncated=False)
        runner.score([RewardSample(response={doing!r}, **row)])
        time.sleep(300)
    """)
    run = subprocess.Popen([sys.executable, "-c", code])
    try:
        pids = pids_in(note, 2)
        assert len(alive(pids)) == 2
    finally:
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
    wait_until_gone(pids)


def test_an_ordinary_exit_without_close_leaves_no_orphan(tmp_path: Path) -> None:
    note = tmp_path / "pids"
    code = textwrap.dedent(f"""
        from rlsdk.interfaces import RewardSample
        from rlsdk.rewards import RewardDef, RewardLimits, RewardRunner
        rewards = [RewardDef(name="a", target={f"{FUNCTIONS}:leaves_a_child"!r})]
        runner = RewardRunner(rewards, RewardLimits(allow_writes=True))
        runner.score([RewardSample(prompt={str(note)!r}, response="go", answer=None, row={{}}, truncated=False)])
    """)
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    wait_until_gone(pids_in(note, 2))


def test_the_package_imports_without_torch_and_without_what_its_graders_need() -> None:
    code = (
        "import sys, rlsdk.rewards.math.graders, rlsdk.rewards.math.symbolic; "
        "heavy = {'torch', 'math_verify', 'sympy', 'datasets', 'ray'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.fixture
def many_open_files() -> Iterator[int]:
    """More than the 1024 that `select` can wait for; gives the lowest number that is free."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip(f"this process may open {hard} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    yield held[-1]
    for descriptor in held:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_program_with_more_than_1024_open_files_has_its_samples_graded(start: Start, many_open_files: int) -> None:
    assert many_open_files >= 1024
    runner = start("length", limits=RewardLimits(timeout_s=20.0))
    long = "x" * (1 << 20)  # more than a pipe holds, so that the program waits for room
    result = runner.score([sample(long), *(sample("y" * at) for at in range(4))])
    assert (result.scores.tolist(), result.failures) == ([float(1 << 20), 0.0, 1.0, 2.0, 3.0], {})


def test_the_folder_of_a_grading_process_is_removed_after_kill_minus_nine_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the next run on this machine, with what a function or a program left in it."""
    code = textwrap.dedent(f"""
        import time
        from rlsdk.interfaces import RewardSample
        from rlsdk.rewards import RewardDef, RewardRunner
        runner = RewardRunner([RewardDef(name="a", target={f"{FUNCTIONS}:leaves_a_file"!r})])
        runner.score([RewardSample(prompt="p", response="r", answer=None, row={{}}, truncated=False)])
        print("graded", flush=True)
        time.sleep(60)
    """)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"graded\n"
        process.kill()
    assert [path.name for path in tmp_path.glob("*/left")] == ["left"]
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with RewardRunner([RewardDef(name="a", target=f"{FUNCTIONS}:length")]) as runner:
        runner.wait_ready()
        assert not list(tmp_path.glob("*/left"))
    assert not list(tmp_path.iterdir())
