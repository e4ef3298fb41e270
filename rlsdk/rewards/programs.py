"""Grading of programs by running the tests of the data row."""

from __future__ import annotations

import ast
import json
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from rlsdk.interfaces import RewardSample
from rlsdk.rewards.answer import final_answer, without_thoughts
from rlsdk.rewards.sandbox import Limits, run_io, run_tests

MAX_CHARS = 65_536
"""A longer program is not run."""

_FENCED = re.compile(r"```[ \t]*+(?:python3?|py)?[ \t]*+\n(.*?)```", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One test of a row."""

    source: str
    """Statements, an expression, or the input of a program."""
    expected: Any = None
    """Value of the expression, or the program's output."""
    kind: str = "test"
    """`test`: statements that must not raise; `value`: an expression; `io`: a program's input and output."""


def code(
    sample: RewardSample,
    *,
    field: str = "tests",
    setup_field: str | None = None,
    timeout_s: float = 8.0,
    memory_mb: int = 512,
    partial: bool = False,
    packages: bool = False,
    unconfined: bool = False,
) -> float:
    """1 when all of the row's tests pass on the response's code; 0 otherwise, or the share that passes.

    The code is the last fenced block after the thoughts, or what stands in `<answer>` tags. It runs in a process of
    its own: no network, no other process to be seen, nothing to write to but folders in memory that are empty and
    vanish, limits on time and memory; with it ends whatever it started. On Linux only.

    Where a test says `assert CALL == VALUE`, the process computes the call and the comparison is made outside: neither
    leaving early nor an object that is equal to everything passes. Other tests run beside the code, which might tamper
    with them.

    Args:
        sample: its row has tests: a list of `assert` statements (MBPP), statements that define `check(candidate)` with
            `entry_point` in the row (HumanEval), a list of `{"input": ..., "output": ...}`, or
            `{"inputs": [...], "outputs": [...]}` (APPS): lines on standard input and output, blanks at line ends aside.
        field: of the row, with the tests; JSON text of them, too.
        setup_field: of the row, with statements to run before the code (imports).
        timeout_s: seconds for all tests together; keep it below `reward_limits.timeout_s`.
        memory_mb: MiB of address space.
        partial: True: the share of tests that pass.
        packages: True: the code may import installed packages, and not only the standard library.
        unconfined: True: runs the code with the run's own rights, where the machine does not let processes be
            confined. Only for code that you would run yourself.

    Raises:
        ValueError: the row has no tests that can be read.
        RuntimeError: processes cannot be confined here.
    """
    tests = read_tests(sample.row, field)
    program = program_of(sample.response)
    if program is None:
        return 0.0
    if not unconfined and _why_not_confined() is not None:
        raise RuntimeError(
            f"code cannot be confined on this machine ({_why_not_confined()}); allow user namespaces, or set the "
            f"reward's option 'unconfined: true' for code that you would run yourself"
        )
    limits = Limits(seconds=timeout_s, memory_mb=memory_mb, packages=packages, confined=not unconfined)
    setup = str(sample.row.get(setup_field) or "") if setup_field else ""
    passed = list(
        _pass_io(program, tests, limits) if tests[0].kind == "io" else _pass_tests(program, setup, tests, limits)
    )
    return sum(passed) / len(tests) if partial else float(all(passed) and len(passed) == len(tests))


def program_of(response: str) -> str | None:
    """The code of a response; None where there is none, it is too long or no Python."""
    visible = without_thoughts(response)
    blocks = _FENCED.findall(visible)
    text = blocks[-1] if blocks else final_answer(visible) if "<answer>" in visible else None
    if text is None or not text.strip() or len(text) > MAX_CHARS:
        return None
    try:
        compile(text, "<response>", "exec", ast.PyCF_ONLY_AST)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return text


def read_tests(row: Mapping[str, Any], field: str) -> list[Case]:
    """The tests of a row.

    Raises:
        ValueError: there are none, or they have another form.
    """
    found = row.get(field)
    if isinstance(found, str) and found.lstrip()[:1] in ("[", "{"):
        found = json.loads(found)
    if isinstance(found, Mapping) and "inputs" in found and "outputs" in found:
        found = [{"input": i, "output": o} for i, o in zip(found["inputs"], found["outputs"], strict=True)]
    if isinstance(found, str):
        found = [_with_check(found, row.get("entry_point"))]
    if not isinstance(found, Sequence) or not found:
        raise ValueError(f"the data row has no tests in {field!r}; set the reward's option 'field'")
    tests = [test for item in found for test in _read_test(item, field)]
    if len({test.kind == "io" for test in tests}) > 1:
        raise ValueError(f"the data row mixes statements with inputs and outputs in {field!r}")
    return tests


def _read_test(item: Any, field: str) -> Iterator[Case]:
    if isinstance(item, Mapping) and "input" in item and "output" in item:
        yield Case(kind="io", source=_as_lines(item["input"]), expected=_as_lines(item["output"]))
    elif isinstance(item, str):
        yield _read_statement(item)
    else:
        raise ValueError(f"a test of {field!r} is {item!r:.80}; expected a statement or an input with its output")


def _read_statement(source: str) -> Case:
    """`assert CALL == VALUE` as a value to compute; anything else as it is."""
    try:
        body = ast.parse(source).body
    except SyntaxError as error:
        raise ValueError(f"a test is no Python: {source[:80]!r}: {error.msg}") from error
    match body:
        case [ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]))]:
            try:
                return Case(kind="value", source=ast.unparse(left), expected=ast.literal_eval(right))
            except ValueError:
                return Case(source=source)
    return Case(source=source)


def _with_check(source: str, entry_point: Any) -> str:
    return f"{source}\n\ncheck({entry_point})" if entry_point and "def check(" in source else source


def _as_lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _pass_io(program: str, tests: Sequence[Case], limits: Limits) -> Iterator[bool]:
    """Ends at the deadline: tests that did not run did not pass."""
    deadline = time.monotonic() + limits.seconds
    for test in tests:
        left = deadline - time.monotonic()
        if left <= 0:
            return
        outcome = run_io(program, test.source, limits, left)
        yield outcome.exit_code == 0 and _trimmed(outcome.output) == _trimmed(test.expected)


def _pass_tests(program: str, setup: str, tests: Sequence[Case], limits: Limits) -> Iterator[bool]:
    nonce = secrets.token_hex(16)
    outcome = run_tests(program, setup, [(test.kind, test.source) for test in tests], nonce, limits)
    for at, test in enumerate(tests):
        records = [record for record in outcome.results if record.get("at") == at]
        if len(records) != 1:  # none, or several guesses
            yield False
        elif test.kind == "value":
            yield _is_value(records[0].get("value"), test.expected)
        else:
            yield records[0].get("nonce") == nonce


@cache
def _why_not_confined() -> str | None:
    """What this machine says when a process confines itself; None when it may."""
    outcome = run_tests("", "", [], "", Limits(seconds=20.0, memory_mb=512))
    return next((str(record["refused"]) for record in outcome.results if "refused" in record), None)


def _is_value(data: Any, expected: Any) -> bool:
    try:
        value = _decode(data)
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return False
    return bool(value == expected)


def _decode(data: Any) -> Any:
    """What `sandbox_child.as_data` encoded. Raises ValueError and its kin for anything else."""
    if not isinstance(data, dict) or len(data) != 1:
        raise ValueError("no value")
    ((kind, inner),) = data.items()
    match kind:
        case "value":
            if inner is None or isinstance(inner, bool | str):
                return inner
        case "int":
            return int(inner, 16)
        case "float":
            return float.fromhex(inner)
        case "dict":
            return {_decode(key): _decode(value) for key, value in inner}
        case "list":
            return [_decode(item) for item in inner]
        case "tuple":
            return tuple(_decode(item) for item in inner)
        case "set":
            return {_decode(item) for item in inner}
    raise ValueError("no value")


def _trimmed(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
