"""Reads the tests of a data row for programs: statements, inputs with outputs, and calls of a function."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlsdk.interfaces import nearest

_LISTS = ("inputs", "outputs", "fn_name")
"""Keys of tests as lists (APPS, TACO)."""
_ITEM = ("input", "output", "fn_name", "func_name", "type", "testtype")
"""Keys of one test with an input and an output."""
_CALLS = {"stdin": False, "stdin_stdout": False, "functional": True, "function_call": True}
"""Values of `type` and `testtype` -> whether the test calls a function."""
_INT = re.compile(r"-?[0-9]{1,18}")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One test of a row."""

    source: str
    """Statements, an expression, the input of a program, or a call as JSON: `function` and `arguments`."""
    expected: Any = None
    """Value of the expression, output of the program, or list of the values that the call may return."""
    kind: str = "test"
    """`test`: statements that must not raise; `value`: an expression; `io`: input and output of a program; `call`: a
    call of a function."""


def read_tests(row: Mapping[str, Any], field: str) -> list[Case]:
    """Returns the tests of a row.

    Raises:
        ValueError: there are none, or their form is unknown; the message names the key.
    """
    raw = _loaded(row.get(field), field)
    if isinstance(raw, Mapping):
        raw = _items(raw, field)
    if isinstance(raw, str):
        raw = [_with_check(raw, row.get("entry_point"))]
    if not isinstance(raw, Sequence) or not raw:
        raise ValueError(
            f"the data row has no tests in {field!r}; set the reward's option 'field'{nearest(field, row)}"
        )
    tests = [test for at, item in enumerate(raw) for test in _read_test(item, f"{field}.{at}", row)]
    kinds = {test.kind for test in tests}
    if "io" in kinds and len(kinds) > 1:
        raise ValueError(f"the data row mixes statements or calls with inputs and outputs in {field!r}")
    return tests


def _loaded(value: Any, field: str) -> Any:
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the data row's {field!r} is not valid JSON: {error}") from error


def _items(columns: Mapping[str, Any], field: str) -> list[dict[str, Any]]:
    """The tests of lists, one by one."""
    _check_keys(columns, _LISTS, field)
    inputs, outputs = (columns.get(name) for name in ("inputs", "outputs"))
    for name, values in (("inputs", inputs), ("outputs", outputs)):
        if not isinstance(values, list | tuple):
            raise ValueError(f"'{field}.{name}' is a {type(values).__name__}; expected a list")
    assert isinstance(inputs, list | tuple)
    assert isinstance(outputs, list | tuple)
    if len(inputs) != len(outputs):
        raise ValueError(f"{field!r} has {len(inputs)} inputs and {len(outputs)} outputs; expected as many")
    pairs = zip(inputs, outputs, strict=True)
    return [{"input": call_input, "output": output, "fn_name": columns.get("fn_name")} for call_input, output in pairs]


def _read_test(item: Any, where: str, row: Mapping[str, Any]) -> Iterator[Case]:
    if isinstance(item, Mapping):
        _check_keys(item, _ITEM, where)
        for key in ("input", "output"):
            if key not in item:
                raise ValueError(f"{where!r} has no {key!r}; it has {sorted(item)}")
        name = _function_of(item, where, row)
        yield _read_io(item, where) if name is None else _read_call(name, item["input"], item["output"], where)
    elif isinstance(item, str):
        yield _read_statement(item)
    else:
        raise ValueError(f"{where!r} is {item!r:.80}; expected a statement, or an input with its output")


def _check_keys(mapping: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in mapping:
        if key not in known:
            raise ValueError(
                f"{where!r} has the key {key!r}, which is not understood{nearest(str(key), known)}; expected "
                f"{list(known)}"
            )


def _function_of(item: Mapping[str, Any], where: str, row: Mapping[str, Any]) -> str | None:
    """The function that a test calls; None if it is about input and output of a program."""
    name = item.get("fn_name") or item.get("func_name")
    kinds = [item[key] for key in ("type", "testtype") if item.get(key) is not None]
    for kind in kinds:
        if kind not in _CALLS:
            raise ValueError(f"{where!r} is of type {kind!r}{nearest(str(kind), _CALLS)}; expected {list(_CALLS)}")
    if kinds and not _CALLS[kinds[0]]:
        if name is not None:
            raise ValueError(
                f"{where!r} is of type {kinds[0]!r}, and names the function {name!r}; expected one of both"
            )
        return None
    if name is None and kinds:
        name = _name_in_row(row)
        if name is None:
            raise ValueError(f"{where!r} calls a function, whose name is missing; give it as 'fn_name'")
    if name is not None and not (isinstance(name, str) and name.isidentifier()):
        raise ValueError(f"{where!r} has fn_name {name!r}; expected the name of a function")
    return name


def _name_in_row(row: Mapping[str, Any]) -> Any:
    metadata = row.get("metadata")
    try:
        metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
    except ValueError:
        metadata = None
    places = [row, metadata] if isinstance(metadata, Mapping) else [row]
    return next((place[key] for place in places for key in ("fn_name", "func_name") if place.get(key)), None)


def _read_io(item: Mapping[str, Any], where: str) -> Case:
    for key in ("input", "output"):
        if item[key] is None or isinstance(item[key], Mapping):
            raise ValueError(f"'{where}.{key}' is {item[key]!r:.80}; expected text, or a list of lines")
    return Case(kind="io", source=_as_lines(item["input"]), expected=_as_lines(item["output"]))


def _as_lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _read_call(name: str, call_input: Any, output: Any, where: str) -> Case:
    """A call with its arguments as a list (APPS, TACO), or as text with one value a line (LiveCodeBench)."""
    if isinstance(call_input, str):
        lines = [line for line in call_input.splitlines() if line.strip()]
        arguments = [_value(line, f"{where}.input") for line in lines]
        output = _value(output, None) if isinstance(output, str) else output
    elif call_input is None or isinstance(call_input, Mapping):
        raise ValueError(f"'{where}.input' is {call_input!r:.80}; expected a list of the arguments of {name!r}")
    else:
        arguments = list(call_input) if isinstance(call_input, list | tuple) else [call_input]
    values = [output, output[0]] if isinstance(output, list | tuple) and len(output) == 1 else [output]
    source = json.dumps({"function": name, "arguments": arguments})
    return Case(kind="call", source=source, expected=[comparable(value) for value in values])


def _value(text: str, where: str | None) -> Any:
    """The value of a line: JSON or a Python literal. Without `where`, other text is a value itself."""
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    if where is None:
        return text
    raise ValueError(f"{where!r} has the line {text!r:.80}; expected an argument as JSON or as a Python literal")


def comparable(value: Any) -> Any:
    """A value without the differences that JSON does not know: tuples are lists, and keys of digits are integers."""
    if isinstance(value, list | tuple):
        return [comparable(item) for item in value]
    if isinstance(value, Mapping):
        is_int = all(isinstance(key, str) and _INT.fullmatch(key) for key in value)
        return {int(key) if is_int else key: comparable(item) for key, item in value.items()}
    return value


def _read_statement(source: str) -> Case:
    """Turns `assert CALL == VALUE` into a value to compute; keeps any other statement as it is."""
    try:
        body = ast.parse(source).body
    except SyntaxError as error:
        raise ValueError(f"a test is not valid Python: {source[:80]!r}: {error.msg}") from error
    match body:
        case [ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]))]:
            try:
                return Case(kind="value", source=ast.unparse(left), expected=ast.literal_eval(right))
            except ValueError:
                return Case(source=source)
    return Case(source=source)


def _with_check(source: str, entry_point: Any) -> str:
    return f"{source}\n\ncheck({entry_point})" if entry_point and "def check(" in source else source
