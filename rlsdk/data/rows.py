"""One row of a data set, and its location for messages."""

from __future__ import annotations

import datetime
import decimal
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from rlsdk.interfaces import DataError, nearest
from rlsdk.interfaces.spelling import Setting

JsonValue: TypeAlias = "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
"""Values that a row may contain. Rows are sent to grading processes as JSON."""

MAX_DEPTH = 64
"""Deepest nesting of lists and objects; code that reads rows is recursive and must not overflow the stack."""
MAX_INT_BITS = 4096
"""Most bits of an integer: Python refuses to parse more than 4,300 digits."""

Messages: TypeAlias = Sequence[Mapping[str, JsonValue]]
"""Chat messages: `{"role": ..., "content": ...}` each."""
Reply: TypeAlias = "str | Mapping[str, JsonValue]"
"""An answer: its text, or a message of the assistant."""


@dataclass(frozen=True, kw_only=True)
class Fields:
    """Names of the fields of a source that hold prompt and answer."""

    prompt: str = "question"
    answer: str = "answer"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The two answers of a preference pair."""

    chosen: Reply
    rejected: Reply
    context: Messages
    """Messages before the answers, as the conversations have them; empty where the answers stand alone."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """A solution in steps."""

    texts: tuple[str, ...]
    """Of each step, without what separates them."""
    labels: tuple[float | None, ...]
    """Of each step: 0 wrong to 1 right; None: not learned."""


@dataclass(frozen=True, kw_only=True)
class DataRow:
    """A row as loaded; `PromptFormat.select` fills in what stands below `fields`."""

    row: Mapping[str, JsonValue]
    source: str
    """`file:line`, or the data set's name and 1-based row number, for error messages."""
    fields: Fields = Fields()
    """Where prompt and answer are read, unless the configuration names the fields."""
    prompt: str | Messages = field(default="")
    answer: str | None = None
    reply: Messages | None = None
    """The answer as messages, if the row gives it so."""
    is_split: bool = False
    """Whether the answer was the last turn of the prompt field's conversation."""
    tools: Messages | None = None
    """Column `tools`: JSON schemas of the tools that the chat template describes to the model."""
    pair: Pair | None = None
    """The two answers, if the row is read as a preference pair."""
    steps: Steps | None = None
    """The solution, if the row is read as one in steps."""


def lookup(row: Mapping[str, JsonValue], path: str) -> JsonValue:
    """The value of a field; `reward_model.ground_truth` reads nested objects unless a field has exactly that name.

    Raises:
        KeyError: with the missing part of `path`.
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
        row: without the field.
        asked_by: what needs the field.
        flag: of the configuration, to name another field.
        others: further valid names that are not fields.
    """
    name = f"Name the field that holds it (`{Setting(flag, 'FIELD')}`)" if flag else "Name another field"
    have = sorted(row.row)
    return DataError(
        f"{row.source}: row has no field {path!r}{nearest(path, [*others, *have])} ({asked_by}); it has {have}. "
        f"{name}, or fix the row"
    )


def to_json(value: object, where: str, depth: int = 0) -> JsonValue:
    """Converts `value` to JSON types: tuples, sets, dates, decimals and numpy values are converted.

    Raises:
        DataError: a value has no JSON form (bytes, images, ...), is nested too deeply, or is a number or text that JSON
            readers refuse; `where` names the row and field.
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
    """Plain built-ins unchanged; subclasses (`numpy.str_`, `numpy.float64`, enums) converted to the built-in that they
    extend."""
    if isinstance(value, str):
        return _text(str(value) if type(value) is str else str.__str__(value), where)
    if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
        raise DataError(f"{where}: holds an integer of more than {MAX_INT_BITS:,} bits; write it as a text in quotes")
    for kind in (bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    return None


def _text(value: str, where: str) -> str:
    r"""The text unchanged; a lone surrogate (`"\ud800"` in JSON) is an error, as it cannot be encoded."""
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
    """Converts what a source yielded to a row: a mapping of fields, or a row.

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
