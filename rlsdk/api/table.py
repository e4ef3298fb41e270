"""Rows as a list of mappings, which `print` and notebooks show as a table and pandas accepts."""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlsdk.interfaces import ConfigError, nearest
from rlsdk.system.printable import printable
from rlsdk.system.quantities import counted

SHOWN_ROWS, SHOWN_COLUMNS, SHOWN_CHARS = 20, 12, 200
"""Limits of what is shown of a table; the list has everything."""
TEXT_CHARS, TEXT_WIDTH = 24, 100
"""Longest cell and line of a table in a terminal."""


class Table(list[Mapping[str, Any]]):
    """A list of rows. Rows may lack columns."""

    @property
    def columns(self) -> list[str]:
        """Names of all columns, in order of first appearance."""
        return list(dict.fromkeys(name for row in self for name in row))

    def column(self, name: str) -> list[Any]:
        """The values of a column; rows without it are skipped.

        Raises:
            KeyError: no row has it; names the nearest.
        """
        if name not in self.columns:
            raise KeyError(f"no column {name!r}{nearest(name, self.columns)}; there are {self.columns}")
        return [row[name] for row in self if name in row]

    def last(self, name: str) -> Any:
        """The newest value of a column. Raises `KeyError` as `column`."""
        return self.column(name)[-1]

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` of all rows; missing values are NaN.

        Raises:
            ConfigError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ConfigError(f"a table as a data frame needs pandas ({error}); run `pip install pandas`") from error
        return pandas.DataFrame(list(self))

    def __repr__(self) -> str:
        return "\n".join((*_lines(self, self._fullest_first()), f"[{self._size()}]"))

    def _repr_html_(self) -> str:
        columns = self._fullest_first()[:SHOWN_COLUMNS]
        head = "".join(f"<th>{html.escape(_text(name, SHOWN_CHARS))}</th>" for name in columns)
        body = "".join(
            f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>"
            for cells in _cells(self, columns, SHOWN_CHARS)
        )
        return f"<table><tr>{head}</tr>{body}</table><p>{self._size()}</p>"

    def _fullest_first(self) -> list[str]:
        """Columns that more rows have come first: most steps have no evaluation."""
        return sorted(self.columns, key=lambda name: sum(name not in row for row in self))

    def _size(self) -> str:
        return f"{counted(len(self), 'row')}, {counted(len(self.columns), 'column')}"


def _lines(table: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> Iterator[str]:
    """Header and rows, aligned; as many of the first columns as fit."""
    named = [[_text(name, TEXT_CHARS) for name in columns], *_cells(table, columns, TEXT_CHARS)]
    widths = [max(map(len, cells)) for cells in zip(*named, strict=True)]
    ends = itertools.accumulate(width + 2 for width in widths)
    fitting = sum(1 for end in ends if end <= TEXT_WIDTH)
    for cells in named if columns else ():
        yield "  ".join(cell.rjust(width) for cell, width in zip(cells[:fitting], widths[:fitting], strict=True))


def _cells(table: Sequence[Mapping[str, Any]], columns: Sequence[str], chars: int) -> Iterator[list[str]]:
    """The first and the last rows, with a row of dots where rows between them are left out."""
    half = SHOWN_ROWS // 2
    is_whole = len(table) <= SHOWN_ROWS
    for row in table if is_whole else table[:half]:
        yield [_text(row.get(name, "-"), chars) for name in columns]
    if not is_whole:
        yield ["..." for _ in columns]
        for row in table[-half:]:
            yield [_text(row.get(name, "-"), chars) for name in columns]


def _text(value: object, chars: int) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return (
        printable(text if len(text) <= chars else f"{text[: chars - 3]}...").replace("\n", "\\n").replace("\t", "\\t")
    )
