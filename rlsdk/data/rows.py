"""One row of a data set, wherever it came from, and where to find it again."""

from __future__ import annotations

import datetime
import decimal
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from rlsdk.interfaces import DataError, nearest

JsonValue: TypeAlias = "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
"""What a row may hold. Rows cross to the grading process as JSON."""

MAX_DEPTH = 64
"""Of lists and objects in each other. What reads rows later recurses, and must not run out of stack."""
MAX_INT_BITS = 4096
"""Of an integer: Python refuses to read back those of more than 4,300 digits."""

Messages: TypeAlias = Sequence[Mapping[str, JsonValue]]
"""Chat messages: `{"role": ..., "content": ...}` each."""


@dataclass(frozen=True, kw_only=True)
class DataRow:
    """A row as its source gave it; `prompt` and `answer` are filled in by `PromptFormat.select`."""

    row: Mapping[str, JsonValue]
    source: str
    """`file:line`, or the data set's name and 1-based row number: what error messages point at."""
    prompt: str | Messages = field(default="")
    answer: str | None = None


def lookup(row: Mapping[str, JsonValue], path: str) -> JsonValue:
    """The value of a field; `reward_model.ground_truth` looks into nested objects unless a field has that very name.

    Raises:
        KeyError: with the part of `path` that is not there.
    """
    if path in row:
        return row[path]
    value: JsonValue = row
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise KeyError(part)
        value = value[part]
    return value


def missing_field(
    path: str, row: DataRow, asked_by: str, *, flag: str | None = None, others: Sequence[str] = ()
) -> DataError:
    """The error for a field that a row lacks: names the row, the fields that it has, and the nearest one.

    Args:
        path: of the field.
        row: that lacks it.
        asked_by: what asks for it.
        flag: of the configuration, that names another field.
        others: names that are no fields and would do, too.
    """
    name = f"Name the field that holds it (`--{flag} FIELD`)" if flag else "Name another field"
    have = sorted(row.row)
    return DataError(
        f"{row.source}: row has no field {path!r}{nearest(path, [*others, *have])} ({asked_by}); it has {have}. "
        f"{name}, or fix the row"
    )


def to_json(value: object, where: str, depth: int = 0) -> JsonValue:
    """`value` with tuples, sets, dates, decimals and numpy values turned into what JSON knows.

    Raises:
        DataError: something that has no JSON form (bytes, images, ...), is nested too deeply, or is a number or text
            that no JSON reader takes; `where` names the row and field.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return _exact_scalar(value, where)
    if depth == MAX_DEPTH:
        raise DataError(f"{where}: is nested more than {MAX_DEPTH} levels deep. Leave the field out, or flatten it")
    if isinstance(value, Mapping):
        return {_text(str(key), where): to_json(item, f"{where}.{key}"[:200], depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item, where, depth + 1) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((to_json(item, where, depth + 1) for item in value), key=repr)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal | uuid.UUID):
        return str(value)
    to_list = getattr(value, "tolist", None)
    if callable(to_list):
        return to_json(to_list(), where, depth + 1)
    raise DataError(
        f"{where}: holds a {type(value).__name__}, which a row cannot carry (JSON types only). Leave the field out: "
        f"name those you need in the option `columns`"
    )


def _exact_scalar(value: bool | int | float | str | None, where: str) -> JsonValue:
    """Plain built-ins as they are; subclasses (`numpy.str_`, `numpy.float64`, enums) as the built-in they extend."""
    if isinstance(value, str):
        return _text(str(value) if type(value) is str else str.__str__(value), where)
    if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
        raise DataError(f"{where}: holds an integer of more than {MAX_INT_BITS:,} bits; write it as a text in quotes")
    for kind in (bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    return None


def _text(value: str, where: str) -> str:
    """The same; half a surrogate pair (`"\\ud800"` in JSON) is no character, and could not be written anywhere."""
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where}: holds half a surrogate pair (U+{ord(value[error.start]):04X}) at character "
                f"{error.start + 1}, which is no text; remove it from the row"
            ) from None
    return value


def to_row(value: object, source: str) -> DataRow:
    """Wraps what a source yielded: a mapping of fields, or a row already made.

    Raises:
        DataError: it is neither, or a field has no JSON form.
    """
    if isinstance(value, DataRow):
        return value
    if not isinstance(value, Mapping):
        raise DataError(
            f"{source}: expected an object with named fields, got {type(value).__name__}: {str(value)[:60]!r}"
        )
    fields = {_text(str(k), source): to_json(v, f"{source}: field {str(k)[:60]!r}") for k, v in value.items()}
    return DataRow(row=fields, source=source)
