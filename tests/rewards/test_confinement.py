"""What grading processes cannot do, tried from inside; and what code of a model's can do to other samples: nothing."""

from __future__ import annotations

import os
import resource
import socket
import sys
from pathlib import Path

import pytest

from rlsdk.confinement.measures import MAX_FILE_BYTES, MAX_OPEN_FILES, MORE_PROCESSES, NOBODY, probe
from rlsdk.rewards import RewardDef, RewardLimits, RewardRunner
from rlsdk.rewards.functions.text_evaluation import evaluates_text

from . import functions
from .conftest import Start, sample

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux confines processes")
MISSING = "; ".join(probe().missing) if sys.platform == "linux" else ""
LANDLOCK = pytest.mark.skipif("no file writes" in MISSING, reason=f"this kernel cannot: {MISSING}")
SECCOMP = pytest.mark.skipif("no network" in MISSING, reason=f"this kernel cannot: {MISSING}")
ROOT = pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="only root can be another user")
SAFE = RewardLimits(timeout_s=5.0)


def run(start: Start, what: str, target: Path | str = "", limits: RewardLimits = SAFE) -> tuple[float | None, str]:
    """The value of one spy, or None and its failure."""
    result = start("spies", limits=limits).score([sample(what, prompt=str(target))])
    return (float(result.scores[0]) if result.valid[0] else None), "".join(e.message for e in result.examples)


def test_no_secret_of_the_environment_reaches_a_grader(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLSDK_TEST_SECRET", "s3cret")
    assert run(start, "environment") == run(start, "own environment") == (0.0, "")
    named = RewardLimits(environment=("RLSDK_TEST_SECRET",))
    assert run(start, "environment", limits=named) == (6.0, "")


@LANDLOCK
@pytest.mark.parametrize("what", ["parent's environment", "parent's memory", "parent's files", "signal"])
def test_the_controller_is_out_of_reach(start: Start, what: str) -> None:
    value, message = run(start, what)
    assert value is None
    assert "denied" in message or "not permitted" in message


@SECCOMP
@pytest.mark.parametrize("what", ["socket", "udp", "unix", "name"])
def test_there_is_no_network_and_the_message_names_the_field(start: Start, tmp_path: Path, what: str) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(tmp_path)
        server.bind("s")
        server.listen()
        value, message = run(start, what, "s")
        assert value is None
        assert "reward_limits.allow_network" in message
        value, message = run(start, what, tmp_path / "s", RewardLimits(timeout_s=5.0, allow_network=True))
        assert "reward_limits.allow_network" not in message


@LANDLOCK
@pytest.mark.parametrize("what", ["write", "append", "remove", "mkdir", "rename", "link", "chmod"])
def test_there_are_no_file_writes_and_the_message_names_the_field(start: Start, tmp_path: Path, what: str) -> None:
    target = tmp_path / "file"
    target.write_text("before")
    value, message = run(start, what, target)
    assert value is None
    assert "reward_limits.allow_writes" in message or what == "chmod"  # a program of its own says it in its own words
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert target.read_text() == "before"
    run(start, what, target, RewardLimits(timeout_s=5.0, allow_writes=True))
    assert [path.name for path in tmp_path.iterdir()] != ["file"] or target.read_text() != "before"


@pytest.mark.parametrize(("what", "value"), [("temporary", 1.0), ("null", 1.0), ("program", 3.0), ("core", 0.0)])
def test_what_rewards_need_every_day_works(start: Start, what: str, value: float) -> None:
    assert run(start, what) == (value, "")


@LINUX
def test_privileges_files_and_processes_of_a_grader_have_limits(start: Start) -> None:
    assert run(start, "no new privileges") == (1.0, "")
    assert run(start, "open files") == (float(min(MAX_OPEN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1])), "")
    assert run(start, "size of files") == (float(MAX_FILE_BYTES), "")
    most, message = run(start, "processes")
    assert message == ""
    assert most is not None
    assert MORE_PROCESSES <= most < 10 * MORE_PROCESSES


def test_the_size_of_files_is_bounded_and_temporary_ones_go_with_the_process(start: Start) -> None:
    assert "File too large" in run(start, "huge file")[1]
    runner = start("length")
    runner.wait_ready()
    scratch = runner._holder[0]._processes[0]._scratch
    assert os.path.isdir(scratch)
    runner.close()
    assert not os.path.exists(scratch)


FORGERIES = (
    # later samples of the same process
    "[sample.row.clear()] and __import__('sys').modules[type(sample).__module__].__dict__.clear() or 9.0",
    "[f.__globals__.update(float=lambda x: 77.0) for f in __import__('gc').get_objects() if hasattr(f, '__globals__')]",
    "[setattr(c, 'one', lambda *a: ((3, 77.0), True)) for c in object.__subclasses__() if c.__name__ == '_Reward']",
    "__import__('builtins').__dict__.update(float=lambda x: 77.0) or 1.0",
    # the channel
    "[__import__('os').write(fd, b'\\x03' + bytes(9) + b'\\0\\0\\0\\x08\\0\\0\\0' + bytes(8)) for fd in range(3, 99)]",
    "[open(f'/proc/{__import__(\"os\").getppid()}/fd/{fd}', 'wb') for fd in range(3, 64)]",
    "__import__('os').fork() or 3.0",
    "__import__('os').fork() or __import__('time').sleep(1000)",
    "__import__('os').kill(__import__('os').getppid(), 9)",
    "__import__('os').setsid() or __import__('os').system('sleep 1000 &') or 2.0",
    "__import__('os')._exit(0)",
    "float('nan')",
    "'9'*10**8",
)


@ROOT
def test_where_root_runs_the_controller_graders_are_nobody(start: Start, tmp_path: Path) -> None:
    """Wherever the interpreter stands: what it is made of can be read, for imports and for programs, and nothing else
    of root's rights is left."""
    wanted = {"user": 65534.0, "group": 65534.0, "late import": 8.0, "interpreter": 65534.0, "rights": 0.0}
    assert {what: run(start, what) for what in wanted} == {what: (value, "") for what, value in wanted.items()}
    target = tmp_path / "of root"
    target.touch(mode=0o600)
    value, message = run(start, "mode", target)
    assert value is None
    assert "not permitted" in message
    assert target.stat().st_mode & 0o777 == 0o600


@ROOT
def test_graders_that_may_write_files_write_them_as_who_runs_them(start: Start) -> None:
    assert run(start, "user", limits=RewardLimits(timeout_s=5.0, allow_writes=True)) == (0.0, "")


@LINUX
@pytest.mark.parametrize("forgery", FORGERIES)
def test_code_of_a_model_changes_no_other_sample(start: Start, forgery: str) -> None:
    """A reward that evaluates text is found by its code; each call runs in a fork that cannot reach the controller."""
    responses = ["1+1", forgery, "2+1", "[3.5][0]", forgery, "10"]
    result = start("evaluates", limits=RewardLimits(timeout_s=3.0)).score([sample(r, row={"n": 1}) for r in responses])
    others = [0, 2, 3, 5]
    assert result.valid[others].all()
    assert result.scores[others].tolist() == [2.0, 3.0, 3.5, 10.0]


@SECCOMP
def test_code_of_a_model_changes_no_permissions_of_its_own_user_s_files(start: Start, tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.touch(mode=0o600)
    if os.getuid() == 0:
        os.chown(target, NOBODY, NOBODY)
    changes = [f"chmod({str(target)!r}, 0o777)", f"utime({str(target)!r}, (1, 1))",
               f"setxattr({str(target)!r}, 'user.rlsdk', b'1')"]  # fmt: skip
    samples = [sample(f"__import__('os').{change} or 1.0", row={"n": 1}) for change in changes]
    result = start("evaluates", limits=SAFE).score(samples)
    assert not result.valid.any()
    assert "reward_limits.allow_writes" in result.examples[0].message
    assert (target.stat().st_mode & 0o777, os.listxattr(target)) == (0o600, [])
    allowed = RewardLimits(timeout_s=5.0, allow_writes=True)
    assert start("evaluates", limits=allowed).score(samples[:1]).scores.tolist() == [1.0]


@LINUX
def test_a_machine_whose_permissions_cannot_be_kept_is_named_and_grades(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "import os\nfrom types import SimpleNamespace\nos.uname = lambda: SimpleNamespace(machine='riscv64')\n"
        "def evaluates(sample): return float(eval(sample.response))\n"
    )
    with RewardRunner([RewardDef(name="mine", target=f"{path}:evaluates")], SAFE) as runner:
        result = runner.score([sample("1+1"), sample("2+1")])
    assert result.scores.tolist() == [2.0, 3.0]
    (notice,) = result.notices
    assert "no changes of permissions by functions that run text (unknown machine riscv64)" in notice


@SECCOMP
@pytest.mark.parametrize("allow_network", [True, False])
def test_who_may_not_change_attributes_of_files_gets_no_io_uring(start: Start, allow_network: bool) -> None:
    """io_uring sets extended attributes (Linux 5.19) past the filter of system calls."""
    ring = "__import__('ctypes').CDLL(None, use_errno=True).syscall(425, 0, None)"
    errno = f"{ring} and float(__import__('ctypes').get_errno())"
    limits = RewardLimits(timeout_s=5.0, allow_network=allow_network)
    assert start("evaluates", limits=limits).score([sample(errno)]).scores.tolist() == [13.0]


def test_functions_that_evaluate_text_are_found() -> None:
    assert evaluates_text(functions.evaluates) == "eval"
    for function in (functions.length, functions.misbehave, functions.spies, functions.prints):
        assert evaluates_text(function) is None


def test_isolation_can_be_asked_for_and_refused(start: Start) -> None:
    for isolation, apart in (("always", True), ("never", False), ("auto", False)):
        runner = start("length", limits=RewardLimits(isolation=isolation))  # type: ignore[arg-type]
        assert runner.confinement["in_fork"] == [apart]
        assert runner.score([sample("ab"), sample("abc")]).scores.tolist() == [2.0, 3.0]


@pytest.mark.parametrize("isolation", ["always"])
def test_misbehaviour_in_a_fork_costs_its_own_sample_only(start: Start, isolation: str) -> None:
    from .test_runner import HARMLESS, KINDS, check_attribution

    limits = RewardLimits(timeout_s=2.0, memory_mb=256, isolation="always")
    bad = [kind for kind in KINDS if kind not in ("loop", "sleep", "power", "kill", "close_all")]
    responses = [response for pair in zip(bad, ("fine", *HARMLESS) * 9, strict=False) for response in pair]
    check_attribution(start("misbehave", limits=limits).score([sample(r) for r in responses]), responses)
    batched = start("all_misbehave", limits=limits)
    check_attribution(batched.score([sample(r) for r in ("fine", "true", "raise")]), ["fine", "true", "raise"])


def test_what_is_missing_is_said_once(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = start("length")
    first, second = runner.score([sample("a")]), runner.score([sample("a")])
    missing = runner.confinement["missing"]
    assert len(first.notices) == bool(missing)
    assert all(text in first.notices[0] for text in missing)
    assert not second.notices


def test_the_log_is_bounded_over_restarts_and_processes(start: Start, tmp_path: Path) -> None:
    log = tmp_path / "rewards.log"
    runner = start("misbehave", log_path=log, num_workers=2)
    for _ in range(3):
        runner.score([sample("print"), sample("os_exit")] * 2)
    assert log.stat().st_size < 3 * (4 << 20)
    assert "the log is full" in log.read_text()
    runner.close()
    with RewardRunner(runner.rewards, log_path=log) as again:
        again.score([sample("fine")])
        assert log.stat().st_size == 0
    assert (tmp_path / "rewards.log.1").exists()
