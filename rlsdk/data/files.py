"""Loads rows from local files: JSON lines, JSON, CSV, Parquet. Every error names file and line."""

from __future__ import annotations

import csv
import gzip
import json
import re
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, cast

from rlsdk.data.messages import holds_messages
from rlsdk.data.rows import DataRow, to_row
from rlsdk.interfaces import DataError, nearest
from rlsdk.interfaces.errors import nearest_file
from rlsdk.interfaces.spelling import row_of
from rlsdk.system.files import UnfitFileError, open_regular

MAX_CSV_FIELD_CHARS = 1 << 27
SUFFIXES: Mapping[str, str] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".jsonl.gz": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "csv",
    ".parquet": "parquet",
}  # fmt: skip
"""End of a file's name -> registered source that reads it."""
MOST_SHOWN, LONGEST_SHOWN = 20, 60
"""Column names that a message lists, and characters of each."""
_BOM = b"\xef\xbb\xbf"


def load_json(rest: str, *, field: str | None = None) -> Iterator[DataRow]:
    """Rows of a `.jsonl`, `.ndjson` or `.jsonl.gz` file (one object per line; blank lines are skipped), or of a `.json`
    file (one array).

    Args:
        rest: path of the file.
        field: of a `.json` file whose top level is an object: the field that holds the array; None: the only one that
            holds an array of objects.

    Raises:
        DataError: not UTF-8, not JSON, or not an object, with file and line.
    """
    path = existing_file(rest)
    with _opened(path) as stream:
        head = stream.read(4096).removeprefix(_BOM).lstrip()
    if path.suffix == ".json" and (field is not None or not _looks_like_lines(head)):
        return _json_array(path, field)
    return _json_lines(path)


def load_csv(rest: str, *, delimiter: str | None = None) -> Iterator[DataRow]:
    """Rows of a CSV file with a header line; every value is text.

    Args:
        rest: path of the file.
        delimiter: one character; by default a tab for `.tsv` and a comma otherwise.

    Raises:
        DataError: not UTF-8, a header with a missing or duplicate name, or a row of another width than the header.
    """
    path = existing_file(rest)
    csv.field_size_limit(MAX_CSV_FIELD_CHARS)
    reader = csv.reader(
        (text for _, text in decoded_lines(path)),
        delimiter=delimiter or ("\t" if path.suffix == ".tsv" else ","),
        strict=True,
    )
    try:
        header = next(reader, None)
        names = _checked_header(path, header or [])
        start = reader.line_num + 1
        for cells in reader:
            if cells:
                yield to_row(_named_cells(names, cells, f"{path}:{start}"), f"{path}:{start}")
            start = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}: not CSV: {error}") from error


def load_parquet(rest: str, *, columns: Sequence[str] | None = None) -> Iterator[DataRow]:
    """Rows of a Parquet file; the line in errors is the 1-based row number.

    Args:
        rest: path of the file.
        columns: names of those to read; all by default.
    """
    import pyarrow
    import pyarrow.parquet

    path, number = existing_file(rest), 0
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            check_columns(columns, table.schema_arrow.names, str(path))
            batches = table.iter_batches(batch_size=1024, columns=list(columns) if columns else None)
            rows = chain.from_iterable(batch.to_pylist() for batch in batches)
            for number, row in enumerate(rows, 1):
                yield to_row(row, f"{path}:{number}")
    except DataError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        where = f"{path}:{number + 1}" if number else str(path)
        raise DataError(f"{where}: not a Parquet file that can be read: {_one_line(error)}") from error


class NoFileError(DataError):
    """There is no such file."""

    def __init__(self, message: str, *, is_named: bool = False) -> None:
        """`is_named`: the message suggests a file."""
        super().__init__(message)
        self.is_named = is_named


def existing_file(name: str) -> Path:
    """The path of an existing file.

    Raises:
        DataError: there is no such file; suggests the nearest name in that folder.
    """
    path = local_path(name)
    try:
        if path.is_file():
            return path
        if path.is_dir():
            raise DataError(f"{path}: is a folder, expected a file; give the folder with the source `folder:{path}`")
        wrong, is_named = nearest_file(path, SUFFIXES)
    except OSError as error:
        raise DataError(
            f"{_cut(name)}: cannot be opened: {error.strerror}; check the name and its permissions"
        ) from error
    raise NoFileError(f"{path}: no such file{wrong}", is_named=is_named)


def kind_of_file(path: Path) -> str | None:
    """Registered source that reads files of this name; None: none does."""
    name = path.name.lower()
    return next((kind for suffix, kind in SUFFIXES.items() if name.endswith(suffix)), None)


def local_path(name: str) -> Path:
    """The path as typed, with `~` expanded.

    Raises:
        DataError: `~NAME/` of an unknown user, or an invalid file name.
    """
    try:
        path = Path(name).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{_cut(name)}: is no path that can be opened: {reason}") from error
    if "\0" in name:
        raise DataError(f"{_cut(name)!r}: is no path that can be opened: it holds a null character")
    return path


def _cut(name: str) -> str:
    return name if len(name) <= 80 else f"{name[:77]}..."


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """The file's bytes, unpacked if its name ends in `.gz`."""
    try:
        stream = open_regular(path)
    except UnfitFileError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be opened: {error.strerror}; check its permissions") from error
    with stream:
        try:
            yield cast(BinaryIO, gzip.GzipFile(fileobj=stream)) if path.suffix.lower() == ".gz" else stream
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{path}: not gzip, or cut short: {error}; copy the file again") from error
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}; check the disk, or copy the file") from error


def check_columns(columns: Sequence[str] | None, have: Sequence[str], where: str) -> None:
    """Raises `DataError` for a name in `columns` that is not in `have`."""
    for name in columns or ():
        if name not in have:
            raise DataError(f"{where}: no column {name!r}{nearest(name, have)}; it has {_shown(sorted(have))}")


def _shown(names: Sequence[str]) -> str:
    """The first names, each cut, and how many more there are: a header may be as long as a file."""
    more = f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
    return f"{[name[:LONGEST_SHOWN] for name in names[:MOST_SHOWN]]}{more}"


def decoded_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Line number from 1, and the line with its line end, as strict UTF-8 (a byte-order mark is dropped).

    Raises:
        DataError: not UTF-8; names line and column in bytes.
    """
    with _opened(path) as stream:
        for number, raw in enumerate(stream, 1):
            line = raw.removeprefix(_BOM) if number == 1 else raw
            try:
                yield number, line.decode("utf-8")
            except UnicodeDecodeError as error:
                bad = line[error.start]
                raise DataError(
                    f"{path}:{number}: not UTF-8: byte 0x{bad:02x} at column {error.start + 1}; "
                    f"save the file as UTF-8 and try again"
                ) from error


def _json_lines(path: Path) -> Iterator[DataRow]:
    for number, line in decoded_lines(path):
        if line.isspace():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number}: not JSON: {_json_problem(error)}: {line.strip()[:60]!r}") from error
        yield to_row(value, row_of(path, number))


def _json_problem(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, json.JSONDecodeError):
        return str(error)
    return f"it holds an integer of more than {sys.get_int_max_str_digits():,} digits; write it as a text in quotes"


def _json_line(text: str, error: Exception) -> int:
    """Line of the error. Python reports it for wrong syntax only; for a number that is too long it is searched."""
    if isinstance(error, json.JSONDecodeError):
        return error.lineno
    number = re.search(f"[0-9]{{{sys.get_int_max_str_digits() + 1},}}", text)
    return 1 + text.count("\n", 0, number.start()) if number else 1


def _looks_like_lines(head: bytes) -> bool:
    """Whether the text starts with an object that ends on its first line: JSON lines in a `.json` file."""
    first, _, more = head.strip().partition(b"\n")
    first = first.strip()
    if not first.startswith(b"{") or not first.endswith(b"}") or len(first) <= 2:
        return False
    return bool(more) or not _holds_rows(first)


def _holds_rows(line: bytes) -> bool:
    """Whether the only line of a file is an object around an array of rows."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and len(_lists_of_objects(value)) == 1


def _lists_of_objects(value: Mapping[str, Any]) -> list[str]:
    """Names of the fields that hold an array of objects other than a conversation."""
    return [
        name
        for name, item in value.items()
        if isinstance(item, list) and item and all(isinstance(one, dict) for one in item) and not holds_messages(item)
    ]


def _json_array(path: Path, field: str | None) -> Iterator[DataRow]:
    text = "".join(line for _, line in decoded_lines(path))
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}:{_json_line(text, error)}: not JSON: {_json_problem(error)}") from error
    if isinstance(value, dict):
        return _rows_of_field(path, value, field)
    if not isinstance(value, list):
        raise DataError(f"{path}:1: expected an array of objects, got {type(value).__name__}")
    return _rows_with_lines(path, text, len(value))


def _rows_of_field(path: Path, value: Mapping[str, Any], field: str | None) -> Iterator[DataRow]:
    lists = sorted(name for name, item in value.items() if isinstance(item, list))
    if field is None:
        of_objects = _lists_of_objects(value)
        field = of_objects[0] if len(of_objects) == 1 else None
    if field is None or field not in lists:
        asked = "" if field is None else f" and field={field!r} is none of them{nearest(field, lists)}"
        raise DataError(
            f"{path}:1: the top level is an object{asked}; name the field that holds the array of rows with the "
            f"option `field`: one of {lists}"
        )
    return (to_row(item, f"{path}:{field}[{at}]") for at, item in enumerate(value[field]))


def _rows_with_lines(path: Path, text: str, count: int) -> Iterator[DataRow]:
    """Decodes the elements of a valid top-level array one by one, to find the line of each."""
    decoder = json.JSONDecoder()
    at, line = text.index("[") + 1, 1 + text.count("\n", 0, text.index("["))
    for _ in range(count):
        begin = at
        while text[at] in " \t\r\n,":
            at += 1
        line += text.count("\n", begin, at)
        value, end = decoder.raw_decode(text, at)
        yield to_row(value, f"{path}:{line}")
        line += text.count("\n", at, end)
        at = end


def _checked_header(path: Path, header: Sequence[str]) -> Sequence[str]:
    names = [name.strip() for name in header]
    if not names or "" in names or len(set(names)) != len(names):
        raise DataError(
            f"{path}:1: expected a header line with a name for every column, each once; got {_shown(names)}. "
            f"Add one, for example `question,answer`"
        )
    return names


def _named_cells(names: Sequence[str], cells: Sequence[str], source: str) -> dict[str, str]:
    if len(cells) != len(names):
        raise DataError(
            f"{source}: row has {len(cells)} values, but the header names {len(names)} columns {_shown(names)}; "
            f"a value that holds the delimiter or a line break must stand in double quotes"
        )
    return dict(zip(names, cells, strict=True))
