"""Decides which rewards apply to a data row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from rlsdk.interfaces import ConfigError, nearest
from rlsdk.rewards.scores.definitions import Scalar

_MAX_SHOWN = 8
_MISSING = object()


class Routed(Protocol):
    """What applies to some data rows: a reward, or a teacher."""

    @property
    def weight(self) -> float: ...

    @property
    def rows(self) -> Mapping[str, Sequence[Scalar]]: ...


def value_at(row: Mapping[str, Any], path: str) -> Any:
    """Returns the value of a field, or None if there is no such field.

    A path such as `metadata.source_dataset` reads nested objects, unless a field has exactly that name.
    """
    value = _lookup(row, path)
    return None if value is _MISSING else value


def applies_to(rows: Mapping[str, Sequence[Scalar]], row: Mapping[str, Any]) -> bool:
    """Whether every field of `rows` has one of its values in the data row. True and 1 are different values."""
    return all(any(_same(value_at(row, path), value) for value in values) for path, values in rows.items())


def check_routes(
    rewards: Sequence[Routed], rows: Iterable[tuple[str, Mapping[str, Any]]], *, whole: bool, field: str = "rewards"
) -> None:
    """Checks the `rows` of the rewards against the data.

    Args:
        rewards: all rewards of the run, or all that is routed by `rows` as they are.
        rows: (location, data row) of every row that is graded.
        whole: a row without an applicable reward is an error. False: rows also get a score from elsewhere.
        field: path of the rewards in the configuration.

    Raises:
        ConfigError: no data row has a field or value of `rows` (the message gives the nearest), or no reward applies to
            some data rows.
    """
    if all(not reward.rows for reward in rewards):
        return
    paths = {path for reward in rewards for path in reward.rows}
    seen: dict[str, dict[Any, Any]] = {path: {} for path in paths}
    fields: dict[str, None] = {}
    lost: list[str] = []
    count = 0
    for where, row in rows:
        count += 1
        fields.update(dict.fromkeys(row))
        for path in paths:
            value = _lookup(row, path)
            if value is not _MISSING and isinstance(value, str | int | float | bool | None):
                seen[path].setdefault((type(value), value), value)
        if whole and not any(reward.weight != 0 and applies_to(reward.rows, row) for reward in rewards):
            lost.append(where)
    for at, reward in enumerate(rewards):
        for path, values in reward.rows.items():
            _check_values(f"{field}.{at}.rows.{path}", path, values, list(seen[path].values()), list(fields))
    if lost:
        raise ConfigError(
            f"{field}: no reward of non-zero weight applies to {len(lost)} of {count} data rows, the first is "
            f"{lost[0]}; add their values to the `rows` of a reward, or add a reward without `rows`"
        )


def _check_values(field: str, path: str, values: Sequence[Scalar], seen: Sequence[Any], fields: Sequence[str]) -> None:
    if not seen and any(value is not None for value in values):
        raise ConfigError(f"{field}: no data row has a field {path!r}{nearest(path, fields)}; rows have {fields}")
    for value in values:
        if value is not None and not any(_same(other, value) for other in seen):
            texts = [str(other) for other in seen]
            shown = f"{seen[:_MAX_SHOWN]!r}" + (f" and {len(seen) - _MAX_SHOWN} more" if len(seen) > _MAX_SHOWN else "")
            raise ConfigError(
                f"{field}: no data row has {value!r} there{nearest(str(value), texts)}; rows have {shown}"
            )


def _same(actual: object, value: Scalar) -> bool:
    return actual == value and isinstance(actual, bool) == isinstance(value, bool)


def _lookup(row: Mapping[str, Any], path: str) -> Any:
    if path in row:
        return row[path]
    value: Any = row
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _MISSING
        value = value[part]
    return value
