"""Selects the rewards that apply to a row of the data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlsdk.interfaces import ConfigError, nearest
from rlsdk.rewards.definitions import RewardDef, Scalar

_MAX_SHOWN = 8
_MISSING = object()


def value_at(row: Mapping[str, Any], path: str) -> Any:
    """The value of a field; `metadata.source_dataset` reads nested objects unless a field has exactly that name. None
    if there is no such field."""
    found = _lookup(row, path)
    return None if found is _MISSING else found


def applies_to(rows: Mapping[str, Sequence[Scalar]], row: Mapping[str, Any]) -> bool:
    """Whether every field of `rows` has one of its values in the data row. True and 1 are different values."""
    return all(any(_same(value_at(row, path), value) for value in values) for path, values in rows.items())


def check_routes(
    rewards: Sequence[RewardDef], rows: Iterable[tuple[str, Mapping[str, Any]]], *, whole: bool, field: str = "rewards"
) -> None:
    """Compares the rewards' `rows` with the data.

    Args:
        rewards: of the run.
        rows: (where it stands, data row) of every row that is graded.
        field: where the configuration has them.
        whole: a row that no reward is for is an error; False: it gets a score from elsewhere, too.

    Raises:
        ConfigError: a field or value of `rows` that no row has, with the nearest; or rows that no reward is for.
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
            found = _lookup(row, path)
            if found is not _MISSING and isinstance(found, str | int | float | bool | None):
                seen[path].setdefault((type(found), found), found)
        if whole and not any(reward.weight != 0 and applies_to(reward.rows, row) for reward in rewards):
            lost.append(where)
    for at, reward in enumerate(rewards):
        for path, values in reward.rows.items():
            _check_values(f"{field}.{at}.rows.{path}", path, values, list(seen[path].values()), list(fields))
    if lost:
        raise ConfigError(
            f"{field}: {len(lost)} of {count} data rows are for no reward of non-zero weight, the first is {lost[0]}; "
            "give one of the rewards their values in `rows`, or add a reward without `rows`"
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


def _same(found: object, value: Scalar) -> bool:
    return found == value and isinstance(found, bool) == isinstance(value, bool)


def _lookup(row: Mapping[str, Any], path: str) -> Any:
    if path in row:
        return row[path]
    found: Any = row
    for part in path.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return _MISSING
        found = found[part]
    return found
