"""Typed calls to a group's hosts, by their protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from rlsdk.interfaces import EngineGroup

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def call(group: EngineGroup, method: Callable[[Any], _Result], *, timeout_s: float) -> list[_Result]:
    """Calls a method without arguments on every rank; results in rank order.

    Args:
        group: the group whose hosts are called.
        method: a method of their protocol, such as `WeightSourceHost.weight_layout`.
        timeout_s: deadline of all calls together.
    """
    results: list[_Result] = group.run(method.__name__, timeout_s=timeout_s)
    return results


def call_each(
    group: EngineGroup,
    method: Callable[Concatenate[Any, _Arguments], _Result],
    arguments: Sequence[tuple[Any, ...]],
    *,
    timeout_s: float,
) -> list[_Result]:
    """As `call`, with its own arguments for each rank."""
    results: list[_Result] = group.run_each(method.__name__, arguments, timeout_s)
    return results
