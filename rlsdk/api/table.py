"""Rows of figures as a list of mappings, which notebooks show as a table and pandas takes."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from rlsdk.interfaces import ConfigError, nearest
from rlsdk.kit.printable import printable

SHOWN_ROWS, SHOWN_COLUMNS, SHOWN_CHARS = 20, 12, 200
"""Of a table in a notebook; the list itself has all."""


class Table(list[Mapping[str, Any]]):
    """A list of rows. Rows may lack columns."""

    @property
    def columns(self) -> list[str]:
        """Names of all columns, in the order in which they come up."""
        return list(dict.fromkeys(name for row in self for name in row))

    def column(self, name: str) -> list[Any]:
        """The values of a column; rows that lack it are passed over.

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
        """A `pandas.DataFrame` of all rows; what a row lacks is NaN.

        Raises:
            ConfigError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ConfigError(f"a table as a data frame needs pandas ({error}); run `pip install pandas`") from error
        return pandas.DataFrame(list(self))

    def _repr_html_(self) -> str:
        columns = self.columns[:SHOWN_COLUMNS]
        head = "".join(f"<th>{_cell(name)}</th>" for name in columns)
        body = "".join(_row(row, columns) for row in self[:SHOWN_ROWS])
        return f"<table><tr>{head}</tr>{body}</table><p>{len(self)} rows, {len(self.columns)} columns</p>"


def _row(row: Mapping[str, Any], columns: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<td>{_cell(row.get(name, chr(0x2013)))}</td>' for name in columns)}</tr>"


def _cell(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return html.escape(printable(text[:SHOWN_CHARS]))
