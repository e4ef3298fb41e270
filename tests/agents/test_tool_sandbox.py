"""Sandboxes of tools: what cells do and keep, and everything they must not reach, tried from inside."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlsdk.agents import ConfinedSandbox, open_sandbox
from rlsdk.agents.conformance.lab import Lab
from rlsdk.agents.conformance.requirement import Verdict
from rlsdk.agents.conformance.suite import check
from rlsdk.agents.environments.tools import EnvironmentClass
from rlsdk.agents.sandbox import confined
from rlsdk.confinement.landlock import PORTS_SINCE, version
from rlsdk.interfaces import ConfigError, PluginNotFoundError, Ran, Sandbox, SandboxError, hookimpl
from rlsdk.registry import ComponentKind, Registry, find_function

pytestmark = pytest.mark.skipif(sys.platform != "linux" or version() < 1, reason="needs Linux with Landlock")
EXAMPLE = Path(__file__).parents[2] / "examples" / "python_tool" / "solver.py"
DENIED = ("PermissionError", "Permission denied", "Operation not permitted", "No such file")


@pytest.fixture(scope="module", params=[True, False], ids=["namespaces", "rules only"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[ConfinedSandbox]:
    """One for all tests that leave it usable; those that kill an interpreter get a new one by that."""
    with ConfinedSandbox(seconds=20, processes=24, memory_mb=300, namespaces=request.param) as made:
        yield made


def python(sandbox: Sandbox, code: str, seconds: float = 20.0) -> str:
    return sandbox.python(code, seconds=seconds).text


def gone(word: str, seconds: float = 10.0) -> bool:
    """Whether no process has this word among its arguments, soon."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not any(word.encode() in command for command in commands()):
            return True
        time.sleep(0.05)
    return False


def commands() -> list[bytes]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes())
        except OSError:
            continue
    return found


def test_cells_keep_their_names_and_show_the_last_value(sandbox: ConfinedSandbox) -> None:
    assert sandbox.python("x = 3\nx + 1") == Ran(stdout="4\n")
    assert python(sandbox, "print(x)\nNone") == "3"
    failed = sandbox.python("y = 1\nx / 0")
    assert (failed.code, failed.stdout) == (1, "")
    assert failed.stderr.splitlines()[0::4] == [
        "Traceback (most recent call last):",
        "ZeroDivisionError: division by zero",
    ]
    assert python(sandbox, "exit(3)").endswith("SystemExit: 3")
    assert python(sandbox, "import sys; sys.stdout = None; sys.stdin = None").endswith("'flush'")
    assert python(sandbox, "input(y)").endswith("EOFError: EOF when reading a line")
    assert python(sandbox, "import os\nif os.fork() == 0: print('child')\nelse: os.wait()") == "child"
    assert python(sandbox, "x") == "3"


def test_shell_cells_keep_folder_and_variables(sandbox: ConfinedSandbox) -> None:
    assert sandbox.shell("a=5; mkdir -p in && cd in && pwd").text == f"{sandbox.home}/in"
    assert sandbox.shell('echo "$a"; pwd; cd ..; (exit 4)') == Ran(code=4, stdout=f"5\n{sandbox.home}/in\n")
    assert sandbox.shell("if").code == 2
    assert sandbox.shell("read x; echo [$x]").text == "[]"
    ended = sandbox.shell("exit 7")
    assert (ended.code, ended.ended) == (7, "its interpreter ended")
    assert sandbox.shell("echo [$a]").text == "[]"
    assert sandbox.shell("\0").code == 2


def test_files_go_in_and_out_and_are_shared_by_cells(sandbox: ConfinedSandbox) -> None:
    content = bytes(range(256)) * 5000
    sandbox.put("in/a.bin", content)
    assert sandbox.get("in/a.bin") == content
    assert python(sandbox, "len(open('in/a.bin', 'rb').read())") == f"{len(content)}"
    assert sandbox.shell("wc -c < in/a.bin; echo hi > out").text == f"{len(content)}"
    assert sandbox.get(f"{sandbox.home}/out") == b"hi\n"
    sandbox.put("mine.py", b"def f(): return 41")
    assert python(sandbox, "import mine; mine.f() + 1") == "42"
    for path in ("none", "/etc/passwd", "/dev/zero", "in"):
        with pytest.raises(OSError, match=path):
            sandbox.get(path)
    with pytest.raises(OSError, match="room for 64 MiB"):
        sandbox.put("big", bytes(65 << 20))


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "~/.ssh", "~", "/", "/proc/1/environ", "/proc/self/environ", "/var", __file__]
)
def test_only_listed_files_are_read(sandbox: ConfinedSandbox, path: str) -> None:
    path = os.path.expanduser(path)
    look = "print(os.listdir({0!r}) if os.path.isdir({0!r}) else open({0!r}).read())"
    for way in (path, "link"):
        code = (
            f"import os\nif os.path.islink('link'): os.unlink('link')\nos.symlink({path!r}, 'link')\n{look.format(way)}"
        )
        assert any(word in python(sandbox, code) for word in DENIED)
        assert any(word in sandbox.shell(f"ls {way}/ || cat {way}").text for word in (*DENIED, "Not a directory"))
    with pytest.raises(OSError, match="link"):
        sandbox.get("link")
    with pytest.raises(OSError, match="link"):
        sandbox.put("link", b"")
    sandbox.shell("rm -f link; ln /etc/passwd hard")
    with pytest.raises(OSError, match="hard"):
        sandbox.get("hard")


def test_only_its_own_folder_is_written(sandbox: ConfinedSandbox, tmp_path: Path) -> None:
    for path in (tmp_path / "x", Path(sys.prefix) / "x", Path("/usr/x"), Path("/etc/x")):
        assert "Error" in python(sandbox, f"open({str(path)!r}, 'w')")
        assert not path.exists()
    mode = os.stat(sys.executable).st_mode
    assert "Error" in python(sandbox, f"import os; os.chmod({sys.executable!r}, 0)")
    assert os.stat(sys.executable).st_mode == mode


def test_there_is_no_network(sandbox: ConfinedSandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for family in ("AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK"):
            assert "PermissionError" in python(sandbox, f"import socket; socket.socket(socket.{family})")
        assert sandbox.shell(f"echo > /dev/tcp/127.0.0.1/{port}").code == 1


def test_no_process_outside_is_reached(sandbox: ConfinedSandbox) -> None:
    code = f"""
import ctypes, os
library = ctypes.CDLL(None, use_errno=True)
for pid in (1, os.getppid(), {os.getpid()}):
    for number in (101, 310, 311, 438):  # ptrace, process_vm_readv, process_vm_writev, pidfd_getfd
        assert library.syscall(number, 16, pid, 0, 0, 0, 0) == -1
    for name in ("mem", "environ", "root/etc/passwd", "fd"):
        try:
            path = f"/proc/{{pid}}/{{name}}"
            print("reads", os.listdir(path) if name == "fd" else open(path, "rb").read(9))
        except OSError:
            pass
for pid in ({os.getpid()}, {os.getppid()}):
    try:
        os.kill(pid, 0)
        print("signals", pid)
    except OSError:
        pass
"""
    assert python(sandbox, code) == ""
    sandbox.shell("kill -9 -1; kill -9 1; kill -9 $PPID")  # at most itself
    assert sandbox.shell("echo there").text == "there"
    assert python(sandbox, "'there'") == "'there'"


def test_processes_are_limited(sandbox: ConfinedSandbox) -> None:
    bomb = "import os\nfor _ in range(10**6):\n  try: os.fork()\n  except OSError: pass"
    for made in (sandbox.python(bomb, seconds=1), sandbox.shell(":(){ :|:& };:; sleep 0.5; :", seconds=1)):
        assert made.ended or "Resource temporarily unavailable" in made.stderr
    assert python(sandbox, "1 + 1") == "2"


def test_memory_is_limited_in_each_process_and_in_all(sandbox: ConfinedSandbox) -> None:
    assert python(sandbox, "x = bytearray(10**9)").endswith("MemoryError")
    four = "import os, time\nfor _ in range(3):\n  if os.fork() == 0: break\nx = bytearray(120 << 20)\ntime.sleep(15)"
    ran = sandbox.python(four)
    assert ran.ended == "its processes took more than 300 MiB of memory"
    assert "Variables are lost" in ran.text


def test_files_are_limited(sandbox: ConfinedSandbox) -> None:
    said = python(sandbox, "open('big', 'wb').write(bytes(70 << 20))")
    assert "File too large" in said or "No space left" in said
    assert sandbox.shell("rm -f big").code == 0


def test_output_is_cut_in_its_middle(sandbox: ConfinedSandbox) -> None:
    ran = sandbox.python("print('a' * 10**6 + 'z')")
    assert ran.cut == 10**6 + 2 - 16_000
    assert (ran.stdout[0], ran.stdout[-2:], len(ran.stdout) < 16_100) == ("a", "z\n", True)
    assert "984002 bytes left out" in ran.stdout
    ran = sandbox.shell("yes", seconds=0.5)
    assert ran.timed_out
    assert ran.cut > 0


def test_a_cell_that_takes_too_long_ends_with_all_that_it_started(sandbox: ConfinedSandbox) -> None:
    stubborn = """
import os, signal, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    os.execvp("sleep", ["sleep", "98765.25"])
while True: time.sleep(1)
"""
    started = time.monotonic()
    ran = sandbox.python(stubborn, seconds=1)
    assert (ran.timed_out, ran.ended, ran.code) == (True, "it took more than 1 s", 137)
    assert time.monotonic() - started < 15
    assert gone("98765.25")
    sandbox.put("kept", b"1")
    assert sandbox.shell("sleep 9", seconds=0.2).timed_out
    assert sandbox.get("kept") == b"1"


def test_nothing_that_a_cell_writes_to_the_keeper_breaks_it(sandbox: ConfinedSandbox) -> None:
    for line in (b'{"code": "x", "error": 3}', b"[" * 90_000, b"\xff", b'{"stdout": 1}', b"1e999"):
        assert sandbox.python(f"import os; os.write(4, {line!r} + b'\\n'); 'said'") == Ran(stdout="'said'\n")
    assert sandbox.python("import os\nwhile True: os.write(4, bytes(60000))").ended == "its interpreter said too much"
    assert sandbox.python("import os; os._exit(5)").code == 5
    assert sandbox.python("import os; os.closerange(0, 9)").ended
    assert python(sandbox, "'whole'") == "'whole'"


def test_a_limit_holds_between_cells_too() -> None:
    with ConfinedSandbox(memory_mb=200) as sandbox:
        sandbox.python("import time\ndef grow():\n  time.sleep(.2)\n  global x; x = bytearray(b'x') * (150 << 20)")
        sandbox.python("import os\nfor _ in range(2):\n  if os.fork() == 0: grow(); time.sleep(99)")
        until = time.monotonic() + 20
        while not (ran := sandbox.python("1")).ended and time.monotonic() < until:
            time.sleep(0.5)
        assert "200 MiB" in ran.ended


@pytest.mark.parametrize("namespaces", [True, False])
def test_it_ends_with_the_process_that_made_it_however_that_ends(namespaces: bool) -> None:
    code = (
        "import time\nfrom rlsdk.agents import ConfinedSandbox\n"
        f"s = ConfinedSandbox(namespaces={namespaces})\n"
        "s.shell('(setsid sleep 87654.125 &) &')\nprint('up', flush=True)\ns.shell('sleep 87654.125', seconds=60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    assert not gone("87654.125", seconds=0.1)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert gone("87654.125")


def test_it_outlives_the_thread_that_made_it_and_close_frees_everything() -> None:
    made: list[ConfinedSandbox] = []
    thread = threading.Thread(target=lambda: made.append(ConfinedSandbox()))
    thread.start()
    thread.join()
    time.sleep(0.1)
    (sandbox,) = made
    assert sandbox.python("1").text == "1"
    sandbox.shell("sleep 76543.5 &")
    before = len(os.listdir("/proc/self/fd"))
    sandbox.close()
    sandbox.close()
    assert gone("76543.5")
    assert len(os.listdir("/proc/self/fd")) < before
    with pytest.raises(SandboxError, match="closed"):
        sandbox.python("1")


def test_it_ends_after_its_life() -> None:
    with ConfinedSandbox(life_s=0.5) as sandbox:
        time.sleep(1.0)
        with pytest.raises(SandboxError, match="life_s"):
            sandbox.python("import time; time.sleep(3)")


def test_what_is_asked_for_is_read_and_reached(tmp_path: Path) -> None:
    (tmp_path / "book").write_text("once")
    (tmp_path / "other").write_text("secret")
    with ConfinedSandbox(read=[str(tmp_path / "book")], packages=True) as sandbox:
        assert python(sandbox, f"open({str(tmp_path / 'book')!r}).read()") == "'once'"
        assert "Permission" in python(sandbox, f"open({str(tmp_path / 'other')!r}).read()")
        assert python(sandbox, "import numpy; int(numpy.arange(4).sum())") == "6"


@pytest.mark.skipif(version() < PORTS_SINCE, reason="this kernel's Landlock knows no ports")
def test_only_listed_ports_are_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        first, second = one.getsockname()[1], other.getsockname()[1]
        with ConfinedSandbox(ports=[first]) as sandbox:
            connect = "import socket; socket.create_connection(('127.0.0.1', {0}), 5) and 'connected'"
            assert python(sandbox, connect.format(first)) == "'connected'"
            assert "PermissionError" in python(sandbox, connect.format(second))
            assert "PermissionError" in python(sandbox, "socket.create_server(('127.0.0.1', 0))")


def test_a_system_that_cannot_confine_is_refused_by_name() -> None:
    said = {"held": [], "missing": ["reads of listed files only (the kernel has no Landlock)", "not root (no)"]}
    with pytest.raises(SandboxError, match=r"cannot confine .*no Landlock\).*plugins list"):
        confined._check_confined(said, said["missing"])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"seconds": 0}, "seconds is 0; expected a number above 0"),
        ({"memory_mb": float("nan")}, "memory_mb is nan"),
        ({"read": "/data"}, "expected a list of absolute paths"),
        ({"read": ["data"]}, "expected a list of absolute paths"),
        ({"ports": [0]}, "expected a list of TCP ports"),
        ({"memory": 3}, "memory"),
    ],
)
def test_options_are_checked(options: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        open_sandbox("confined", **options)


def test_others_are_found_by_name() -> None:
    class Container:
        """A sandbox of somebody else."""

        def __init__(self, image: str = "") -> None:
            self.image = image

    class Plugin:
        @hookimpl
        def rlsdk_register_sandboxes(self, register: object) -> None:
            register("container", Container, "")  # type: ignore[operator]

    registry = Registry()
    registry.register_module(Plugin())
    assert registry.component(ComponentKind.SANDBOX, "container") is Container
    assert registry.usable(ComponentKind.SANDBOX) == ["container"]
    assert Registry.discover().component(ComponentKind.SANDBOX, "confined") is ConfinedSandbox
    with pytest.raises(PluginNotFoundError, match="confined"):
        open_sandbox("confind")


def test_the_example_with_a_python_tool_holds_what_an_environment_must() -> None:
    make = find_function(f"{EXAMPLE}:Solver", what="environment")
    lab = Lab(environment=EnvironmentClass.of(make, "Solver"), rows=[{"answer": 42}])
    findings = check(lab, [3, 6, 10])
    assert [finding.verdict for finding in findings] == [Verdict.HELD] * 3
    solver = make()
    assert solver.reset(answer=42).startswith("Compute")
    assert (solver.python("x = 6 * 7"), solver.python("x"), solver.submit(42)) == ("", "42", "submitted")
    assert (solver.done, solver.get_reward()) == (True, 1.0)
    solver.close()


def test_text_for_a_model() -> None:
    assert Ran().text == ""
    assert Ran(stdout="a\n", stderr="b\n").text == "a\nb"
    assert Ran(code=4).text == "[exit status 4]"
    assert Ran(stdout="a", ended="it was slow").text == ("a\n[ended: it was slow. Variables are lost, files are kept]")
