from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlsdk.config import RewardConfig
from rlsdk.confinement import sandbox
from rlsdk.confinement.measures import NOBODY
from rlsdk.data import DataRow
from rlsdk.interfaces import ConfigError
from rlsdk.registry import Registry
from rlsdk.rewards import RewardDef, RewardLimits, RewardRunner
from rlsdk.rewards.code import programs
from rlsdk.rewards.code.program_tests import read_tests
from rlsdk.rewards.code.programs import code, program_of
from rlsdk.trainer.inputs.reward_preflight import check_gradable

sys.path.insert(0, str(Path(__file__).parents[1]))
from rewards.conftest import sample

ADD = "def add(a, b):\n    return a + b\n"
TESTS = ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'", "assert add([1], [2]) == [1, 2]"]


def block(program: str) -> str:
    return f"Here:\n```python\n{program}\n```\n"


def grade(program: str, tests: Any = TESTS, **options: Any) -> float:
    row = {"tests": tests, **options.pop("row", {})}
    return code(sample(block(program), None, row=row), **options)


def test_code_that_passes_all_tests_is_right() -> None:
    assert grade(ADD) == 1.0
    assert grade("def add(a, b):\n    return a - b\n") == 0.0
    assert grade("def add(a, b):\n    return b + a\n") == 0.0
    assert grade("def add(a, b):\n    return b + a\n", partial=True) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    "attack",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit",
        "class Any:\n    def __eq__(self, other): return True\n    __hash__ = None\ndef add(a, b): return Any()",
        "class Any(int):\n    def __eq__(self, other): return True\ndef add(a, b): return Any(0)",
        "import builtins\nbuiltins.AssertionError = type('E', (Exception,), {})\ndef add(a, b): return 0",
        'import os\nfor fd in range(3, 60):\n    try: os.write(fd, b\'{"at": 0, "value": {"int": "3"}}\\n\')\n'
        "    except OSError: pass\ndef add(a, b): return 3",
        "import os\nfor fd in range(3, 60):\n    for guess in range(9):\n        try: os.write(fd, "
        'f\'{{"at": 0, "value": {{"int": "{guess}"}}}}\\n\'.encode())\n        except OSError: pass',
        'import json\njson.dumps = lambda value: \'{"at": 0, "nonce": "x"}\'\ndef add(a, b): return 0',
        "import sys\nsys.setrecursionlimit(10**9)\ndef add(a, b): return add(a, b)",
        "def add(a, b): return 10**10**10",
        "def add(a, b): return 'x' * 10**10",
        "def add(a, b):\n    while True: pass",
        "import time\ntime.sleep(60)",
        "add = 3",
    ],
)
def test_no_trick_passes(attack: str) -> None:
    before = time.monotonic()
    assert grade(attack, ["assert add(1, 2) == 3", "assert add(5, 2) == 7"], timeout_s=1.5) == 0.0
    assert time.monotonic() - before < 40, "some would take longer, or for ever"


def test_statements_that_are_no_comparison_run_beside_the_code() -> None:
    tests = ["assert abs(add(0.1, 0.2) - 0.3) < 1e-9", "assert add(1, 1) in (2, 3)", "assert add(1, 2) == 3"]
    assert grade(ADD, tests) == 1.0
    assert grade("def add(a, b):\n    return 3\n", tests, partial=True) == pytest.approx(2 / 3)
    assert grade("import sys; sys.exit(0)", tests) == 0.0


def test_humaneval_and_mbpp_rows_are_read_as_they_are() -> None:
    check = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(2, 2) == 4\n"
    assert grade(ADD, check, row={"entry_point": "add"}) == 1.0
    assert grade("def add(a, b):\n    return 3\n", check, row={"entry_point": "add"}) == 0.0
    row = {"imports": "import math", "test_list": ["assert area(1) == math.pi"]}
    area = block("def area(r):\n    return math.pi * r * r\n")
    assert code(sample(area, None, row=row), field="test_list", setup_field="imports") == 1.0


def test_programs_are_compared_by_what_they_print() -> None:
    double = "n = int(input())\nprint(n * 2)"
    tests = [{"input": "3\n", "output": "6\n"}, {"input": "10", "output": "20"}]
    assert grade(double, tests) == 1.0
    assert grade("n = int(input())\nprint(6)", tests) == 0.0
    assert grade("n = int(input())\nprint(n * 2)\nraise SystemExit(1)", tests) == 0.0
    assert grade(double, '{"inputs": ["3"], "outputs": ["6"]}') == 1.0
    assert grade("print('x' * 10**8)", tests) == 0.0
    assert grade("import time; time.sleep(30)", tests, timeout_s=0.5) == 0.0


TWO_SUM = """
class Solution:
    def twoSum(self, nums: List[int], target: int) -> Tuple[int, int]:
        seen = {}
        for at, number in enumerate(nums):
            if target - number in seen:
                return (seen[target - number], at)
            seen[number] = at
"""
CALLS: dict[str, Any] = {
    "a list of arguments": {"fn_name": "twoSum", "inputs": [[[2, 7], 9], [[3, 3], 6]], "outputs": [[0, 1], [0, 1]]},
    "a wrapped output": {"fn_name": "twoSum", "inputs": [[[2, 7], 9]], "outputs": [[[0, 1]]]},
    "lines of JSON": {"fn_name": "twoSum", "inputs": ["[2, 7]\n9", "(3, 3)\n6\n"], "outputs": ["[0, 1]", "[0, 1]"]},
    "as text": '{"fn_name": "twoSum", "inputs": [[[2, 7], 9]], "outputs": [[0, 1]]}',
    "one by one": [{"input": "[2, 7]\n9", "output": "[0, 1]", "testtype": "functional", "fn_name": "twoSum"}],
}


@pytest.mark.parametrize("tests", CALLS.values(), ids=CALLS)
def test_functions_are_called_as_apps_and_taco_call_them(tests: Any) -> None:
    assert grade(TWO_SUM, tests) == 1.0
    assert grade("def twoSum(nums, target):\n    return [nums.index(nums[0]), 1]", tests) == 1.0
    assert grade(TWO_SUM.replace("(seen[target - number], at)", "(at, at)"), tests) == 0.0
    assert grade(TWO_SUM.replace("twoSum", "two_sum"), tests) == 0.0
    assert grade(TWO_SUM.replace("return (", "return str("), tests) == 0.0


def test_the_name_of_the_function_may_stand_in_the_row() -> None:
    tests = [{"input": "[2, 7]\n9", "output": "[0, 1]", "testtype": "functional"}]
    assert grade(TWO_SUM, tests, row={"metadata": '{"func_name": "twoSum"}'}) == 1.0


@pytest.mark.parametrize(
    ("program", "given", "output", "score"),
    [
        ("def f(d):\n    return {key + 1: d[key] for key in d}", [{"1": "a"}], [{"2": "a"}], 1.0),
        ("def f(d):\n    return d['a'] + 1", [{"a": 1}], [2], 1.0),
        ("def f(s):\n    return s[::-1]", ["ab"], ["ba"], 1.0),
        ("def f(s):\n    return s[::-1]", ["ab"], "ba", 1.0),
        ("def f():\n    return None", [], [None], 1.0),
        ("def f(n):\n    return [n]", [1], [1], 1.0),
        ("def f(n):\n    return n", [1], [1, 2], 0.0),
        ("def f(n):\n    return [(n, n)]", [1], [[1, 1]], 1.0),
        ("def f(n):\n    return str(n)", [1], [1], 0.0),
        ("def f(n):\n    print(n)", [1], [1], 0.0),
        ("def f(n):\n    return Counter([n]).most_common(1)[0][0] + ceil(0.5) + pow(2, 5, 7)", [1], [6], 1.0),
        ("class Any:\n    def __eq__(self, other): return True\ndef f(n): return Any()", [1], [1], 0.0),
        ("class Solution:\n    @staticmethod\n    def f(n): return n", [1], [1], 1.0),
        ("class Solution:\n    def g(self): return 2\ndef f(n): return Solution().g()", [1], [2], 1.0),
        ("import sys\ndef f(n):\n    sys.exit()", [1], [None], 0.0),
    ],
)
def test_what_a_call_returns_is_compared_as_json_sees_it(program: str, given: Any, output: Any, score: float) -> None:
    assert grade(program, {"fn_name": "f", "inputs": [given], "outputs": [output]}) == score


def test_a_share_of_calls_may_count() -> None:
    tests = {"fn_name": "add", "inputs": [[1, 2], [2, 2], ["a", "b"]], "outputs": [[3], 4, "ab"]}
    assert grade(ADD, tests) == 1.0
    assert grade("def add(a, b):\n    return 4", tests, partial=True) == pytest.approx(1 / 3)


@pytest.mark.parametrize("end", ["exit()", "quit()", "exit(0)", "sys.exit()", "raise SystemExit"])
@pytest.mark.parametrize("packages", [False, True])
def test_a_program_may_end_itself_as_in_a_plain_interpreter(end: str, packages: bool) -> None:
    program = f"import sys\nif input() == 'end':\n    print('ended')\n    {end}\nprint('went on')"
    tests = {"inputs": ["end", "more"], "outputs": ["ended", "went on"]}
    assert grade(program, tests, packages=packages) == 1.0
    assert grade(program, {"inputs": ["end"], "outputs": ["went on"]}, packages=packages) == 0.0
    failing = program.replace(end, "exit('no')")
    assert grade(failing, {"inputs": ["end"], "outputs": ["ended"]}, packages=packages) == 0.0


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```py\nx = 1\n```\nbetter:\n```python\nx = 2\n```", "x = 2\n"),
        ("<think>```python\nx = 1\n```</think>\n```python\nx = 2\n```", "x = 2\n"),
        ("<think>```python\nx = 1\n```", None),
        ("<think>a</think>```python\nx = 1\n```<think>```python\nx = 2\n```", "x = 1\n"),
        ("<answer>x = 1</answer>", "x = 1"),
        ("x = 1", None),
        ("```python\nx = \n```", None),
        ("```python\n\n```", None),
        ("```python\n" + "x = 1\n" * 20_000 + "```", None),
        ("```python\n" + "(" * 5_000 + "\n```", None),
        ("```rust\nlet x = 1;\n```", None),
    ],
)
def test_the_program_is_the_last_block(response: str, program: str | None) -> None:
    assert program_of(response) == program


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        (None, "no tests in 'tests'"),
        ([], "no tests"),
        ([3], "expected a statement"),
        (["assert ("], "not valid Python"),
        (["assert f(1) == 2", {"input": "1", "output": "2"}], "mixes"),
        ({"inputs": ["1"], "outputs": ["2"], "fname": "f"}, "'tests' has the key 'fname', .* did you mean 'fn_name'"),
        ({"inputs": ["1"]}, "'tests.outputs' is a NoneType; expected a list"),
        ({"inputs": ["1"], "outputs": ["2", "3"]}, "1 inputs and 2 outputs"),
        ({"input": "1", "output": "2"}, "has the key 'input', which is not understood; did you mean 'inputs'"),
        ([{"input": "1", "output": "2", "checker": "c"}], "'tests.0' has the key 'checker', which is not understood"),
        ([{"input": "1", "output": "2", "testtype": "function"}], "of type 'function'.*expected"),
        ([{"input": "1", "output": "2", "testtype": "functional"}], "calls a function, whose name is missing"),
        (
            [{"input": "1", "output": "2", "type": "stdin", "fn_name": "f"}],
            "of type 'stdin', and names the function 'f'",
        ),
        ([{"input": "1"}], "'tests.0' has no 'output'"),
        ([{"input": None, "output": "2"}], "'tests.0.input' is None"),
        (
            {"fn_name": "f", "inputs": ["N = 4"], "outputs": ["2"]},
            "'tests.0.input' has the line 'N = 4'; expected an arg",
        ),
        ({"fn_name": "f", "inputs": [{"a": 1}], "outputs": ["2"]}, "expected a list of the arguments of 'f'"),
        (
            {"fn_name": "f(x)", "inputs": [[1]], "outputs": [2]},
            "has fn_name 'f\\(x\\)'; expected the name of a function",
        ),
        ('{"inputs": [', "'tests' is not valid JSON"),
    ],
)
def test_a_row_without_tests_is_an_error(tests: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_tests({"tests": tests}, "tests")


def test_rows_of_code_are_checked_before_a_run() -> None:
    good = {"inputs": ["1"], "outputs": ["2"]}
    rows = [DataRow(row={"tests": tests}, source=f"row {at}") for at, tests in enumerate((good, {**good, "x": 1}))]
    (notice,) = check_gradable([RewardConfig(name="code")], rows, Registry.discover())
    assert "1 of 2 rows looked at cannot be graded" in notice
    assert "row 1: 'tests' has the key 'x', which is not understood" in notice
    with pytest.raises(ConfigError, match=r"none of the 1 rows .* has the key 'x'"):
        check_gradable([RewardConfig(name="code")], rows[1:], Registry.discover())


def test_a_machine_that_does_not_let_code_be_confined_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_why_not_confined", lambda: "unshare: Operation not permitted")
    with pytest.raises(RuntimeError, match=r"to be confined .*Operation not permitted.* 'unconfined: true'"):
        grade(ADD)
    assert grade(ADD, unconfined=True) == 1.0


@pytest.fixture(params=["/tmp", str(Path(__file__).parent)], ids=["hidden", "beside the interpreter"])
def listener(request: pytest.FixtureRequest) -> Iterator[tuple[int, Path]]:
    """A port and a socket file that a program could talk to, in a folder that is hidden from it, and in another."""
    with socket.socket() as server, socket.socket(socket.AF_UNIX) as local:
        server.bind(("127.0.0.1", 0))
        server.listen()
        path = Path(request.param) / f"rlsdk-test-{os.getpid()}.sock"
        local.bind(str(path))
        local.listen()
        yield server.getsockname()[1], path
        path.unlink()


def probing(victim: Path, port: int, path: Path) -> str:
    """A program that tries what code must not be able to do; `f()` names what succeeded."""
    attempts = {
        "network": f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)",
        "socket file": f"import socket; socket.socket(socket.AF_UNIX).connect({str(path)!r})",
        "write": f"open({str(victim)!r}, 'w').write('gone')",
        "delete": f"import os; os.unlink({str(victim)!r})",
        "permissions": f"import os; os.chmod({str(victim)!r}, 0o777)",
        "permissions of an open file": f"import os; os.fchmod(os.open({str(victim)!r}, os.O_RDONLY), 0o755)",
        "permissions of standard error": "import os; os.fchmod(2, os.fstat(2).st_mode & 0o777)",
        "times": f"import os; os.utime({str(victim)!r}, (1, 1))",
        "owner": f"import os; s = os.stat({str(victim)!r}); os.chown({str(victim)!r}, s.st_uid, s.st_gid)",
        "attribute": f"import os; os.setxattr({str(victim)!r}, 'user.rlsdk', b'1')",
        "write beside rlsdk": f"open({sandbox.__file__!r}, 'a')",
        "kill": f"import os; os.kill({os.getpid()}, 0)",
        "kill the grader": "import os; os.kill(os.getppid() or 1, 0); assert os.getppid() > 1",
        "environment": "import os; os.environ['SECRET_TOKEN']",
        "packages": "import numpy",
        "mount": "import ctypes; l = ctypes.CDLL(None); assert l.mount(b'none', b'/', None, 4128, None) == 0",
        "remount": "import ctypes; l = ctypes.CDLL(None); assert l.unshare(0x10020000) == 0; "
        "assert l.mount(b'none', b'/', None, 32 | 4096, None) == 0",
    }
    lines = [f"def attempt_{at}():\n    {source}" for at, source in enumerate(attempts.values())]
    calls = "\n".join(
        f"try:\n    attempt_{at}()\n    done.append({name!r})\nexcept BaseException as error:\n    pass"
        for at, name in enumerate(attempts)
    )
    own = "open('own.txt', 'w').write('x')"
    return "\n".join([*lines, "done = []", calls, own, "def f(): return done"])


def test_code_has_no_network_no_files_to_change_and_no_secrets(
    tmp_path: Path, listener: tuple[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("here")
    if os.getuid() == 0:  # graders are nobody then: whose files it is about are those of the graders' own user
        os.chown(victim, NOBODY, NOBODY)
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    program = probing(victim, *listener)
    outcome = sandbox.run_tests(program, "", [("value", "f()")], "", sandbox.Limits(seconds=20, memory_mb=512))
    assert [record["value"] for record in outcome.results] == [{"list": []}]
    rewards = [RewardDef(name="code", target="rlsdk.rewards.code.programs:code")]
    runner = RewardRunner(rewards, RewardLimits())
    try:
        result = runner.score([sample(block(program), None, row={"tests": ["assert f() == []"]})])
    finally:
        runner.close()
    assert (result.scores.tolist(), result.examples) == ([1.0], ())
    assert victim.read_text() == "here"


COPIES = """
import os, shutil
def f():
    open('a', 'w').write('x')
    shutil.copy('a', 'b')
    shutil.copy2('a', 'c')
    os.chmod('b', 0o755)
    os.utime('b', (1, 1))
    return oct(os.stat('b').st_mode & 0o777), open('c').read()
"""


def test_a_program_may_copy_the_files_of_its_own_folder_and_change_their_permissions() -> None:
    """In namespaces: by itself, and in a grading process that may write files. Where only Landlock holds a program,
    nothing tells its own files from others."""
    tests = ["assert f() == ('0o755', 'x')"]
    assert grade(COPIES, tests) == 1.0
    rewards = [RewardDef(name="code", target="rlsdk.rewards.code.programs:code")]
    with RewardRunner(rewards, RewardLimits(allow_writes=True)) as runner:
        assert runner.score([sample(block(COPIES), None, row={"tests": tests})]).scores.tolist() == [1.0]


def test_whatever_code_starts_ends_with_it(tmp_path: Path) -> None:
    mark = f"rlsdk-test-{os.getpid()}"
    program = (
        "import os, time\n"
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        f"        os.execv('/bin/sh', ['{mark}', '-c', 'sleep 60 # {mark}'])\n    os._exit(0)\n"
        "time.sleep(0.3)\ndef f(): return 1"
    )
    assert grade(program, ["assert f() == 1"]) == 1.0
    deadline = time.monotonic() + 30
    while _running(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _running(mark)


def _running(mark: str) -> bool:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                if mark.encode() in (folder / "cmdline").read_bytes():
                    return True
            except OSError:
                continue
    return False


def test_code_runs_in_a_grading_process_and_ends_with_it() -> None:
    mark = f"rlsdk-test-{os.getpid()}-in-runner"
    rewards = [RewardDef(name="code", target="rlsdk.rewards.code.programs:code", options={"timeout_s": 30})]
    sleeper = f"import os\nos.execv('/bin/sh', ['{mark}', '-c', 'sleep 60 # {mark}'])"
    samples = [
        sample(block(text), None, row={"tests": ["assert add(1, 2) == 3"]})
        for text in (ADD, "def add(a, b): return 0", sleeper)
    ]
    runner = RewardRunner(rewards, RewardLimits(timeout_s=8.0))
    try:
        result = runner.score(samples)
    finally:
        runner.close()
    assert (result.scores.tolist(), result.valid.tolist()) == ([1.0, 0.0, 0.0], [True, True, False])
    assert result.failures == {"timeout": 1}
    deadline = time.monotonic() + 30
    while _running(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _running(mark)
