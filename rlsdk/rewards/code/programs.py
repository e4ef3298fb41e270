"""Grades programs by running the tests of the data row."""

from __future__ import annotations

import ast
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from rlsdk.confinement.sandbox import Limits, run_io, run_tests
from rlsdk.interfaces import ConfigError, RewardSample
from rlsdk.rewards.code.program_tests import Case, comparable, read_tests
from rlsdk.rewards.functions.load import checks_rows
from rlsdk.rewards.text.answer import final_answer, without_thoughts

MAX_CHARS = 65_536
"""Longer programs are not run."""

_FENCED = re.compile(r"```[ \t]*+(?:python3?|py)?[ \t]*+\n(.*?)```", re.DOTALL | re.IGNORECASE)


@checks_rows
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
    """Returns 1 if the response's code passes all tests of the row, else 0; with `partial`, the share that passes.

    The code is the last fenced block after the thoughts, or the content of the `<answer>` tags. It runs in its own
    process, without network, without access to other processes, and with limits on time and memory. It can write only
    to in-memory folders that start empty and are discarded. All processes that it starts end with it. Linux only.

    For a test of the form `assert CALL == VALUE`, the process computes the call, and the comparison runs outside of
    that process. So code cannot pass by exiting early or by returning an object that equals everything. Other tests
    run in the same process as the code, which could tamper with them.

    Args:
        sample: its row has tests: a list of `assert` statements (MBPP), statements that define `check(candidate)` with
            `entry_point` in the row (HumanEval), a list of `{"input": ..., "output": ...}`, or
            `{"inputs": [...], "outputs": [...]}` (APPS, TACO). Inputs and outputs are lines on standard input and
            output; whitespace at the end of a line is ignored. With `fn_name`, that function (a method of the class
            `Solution` if it has one of this name) is called with the values of each input, a list or lines of JSON;
            it must return the output, or the only item of the output. Then the standard modules that such programs
            take for granted (`List`, `Counter`, `heapq`) are imported before the program.
        field: field of the row with the tests, as data or as JSON text.
        setup_field: field of the row with statements to run before the code (imports).
        timeout_s: time limit in seconds for all tests together; keep it below `reward_limits.timeout_s`.
        memory_mb: limit on the address space, in MiB.
        partial: return the share of tests that pass.
        packages: allow the code to import installed packages. Default: only the standard library.
        unconfined: run the code with the full rights of the run, for machines that do not allow confinement. Only for
            code that you would run yourself.

    Raises:
        ConfigError: `timeout_s` or `memory_mb` is not above 0.
        ValueError: the row has no tests, or their form is unknown; the message names the key.
        RuntimeError: this machine does not allow confinement.
    """
    for name, value in {"timeout_s": timeout_s, "memory_mb": memory_mb}.items():
        if not value > 0:
            raise ConfigError(f"{name} is {value!r}: expected a number above 0")
    tests = read_tests(sample.row, field)
    program = program_of(sample.response)
    if program is None:
        return 0.0
    if not unconfined and _why_not_confined() is not None:
        raise RuntimeError(
            f"this machine does not allow code to be confined ({_why_not_confined()}); allow user namespaces, or set "
            f"the reward's option 'unconfined: true' for code that you would run yourself"
        )
    limits = Limits(seconds=timeout_s, memory_mb=memory_mb, packages=packages, confined=not unconfined)
    setup = str(sample.row.get(setup_field) or "") if setup_field else ""
    passed = list(
        _pass_io(program, tests, limits) if tests[0].kind == "io" else _pass_tests(program, setup, tests, limits)
    )
    return sum(passed) / len(tests) if partial else float(all(passed) and len(passed) == len(tests))


def program_of(response: str) -> str | None:
    """Returns the code of a response; None if there is none, it is too long, or it is not valid Python."""
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


def _pass_io(program: str, tests: Sequence[Case], limits: Limits) -> Iterator[bool]:
    """Stops at the deadline; tests that did not run count as failed."""
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
        if len(records) != 1:  # none; or several, written by the code itself
            yield False
        elif test.kind == "value":
            yield _is_value(records[0].get("value"), test.expected)
        elif test.kind == "call":
            yield _is_returned(records[0].get("value"), test.expected)
        else:
            yield records[0].get("nonce") == nonce


@cache
def _why_not_confined() -> str | None:
    """The error that this machine gives when a process tries to confine itself; None if it succeeds."""
    outcome = run_tests("", "", [], "", Limits(seconds=20.0, memory_mb=512))
    return next((str(record["refused"]) for record in outcome.results if "refused" in record), None)


def _is_value(data: Any, expected: Any) -> bool:
    try:
        value = _decode(data)
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return False
    return bool(value == expected)


def _is_returned(data: Any, expected: Sequence[Any]) -> bool:
    try:
        return comparable(_decode(data)) in expected
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return False


def _decode(data: Any) -> Any:
    """Decodes the output of `sandbox_child.as_data`.

    Raises ValueError, TypeError, RecursionError or OverflowError for anything else.
    """
    if not isinstance(data, dict) or len(data) != 1:
        raise ValueError("not an encoded value")
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
    raise ValueError("not an encoded value")


def _trimmed(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
