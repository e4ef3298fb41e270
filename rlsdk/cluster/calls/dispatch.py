"""How a host's method is called on the ranks of its group: how arguments are split, and how results are joined.

A host is any class whose constructor takes a `RankContext` first. Its methods say with `@dispatch` how they are
called; an undeclared method runs on every rank and returns a list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

_ATTRIBUTE = "__rlsdk_dispatch__"
_Method = TypeVar("_Method", bound=Callable[..., Any])


class Split(StrEnum):
    """Which ranks are called, with which part of the arguments."""

    ALL = "all"
    """Every rank, all with the same arguments."""
    DATA = "data"
    """Every rank. A `Batch` or `BatchRef` is split by rows over the data-parallel ranks, balanced by tokens; the
    model-parallel ranks of one data-parallel rank get the same rows. Other arguments go to all. Where one of them has a
    true `whole_groups` (an objective), rows of equal `uid` go to the same rank."""
    RANK_ZERO = "rank_zero"
    """Rank 0 alone."""
    ANY = "any"
    """One rank: the one with the fewest unanswered calls."""


class Join(StrEnum):
    """How results are joined for the caller. If one rank is called, `LIST` and `FIRST` return its result itself."""

    LIST = "list"
    """The result of every rank that was called, in rank order."""
    FIRST = "first"
    """The result of the first collecting rank (`Parallel.is_collector`): for results that are equal on all."""
    FIRST_DONE = "first_done"
    """The result of whichever rank answers first; the others finish on their own and are not waited for."""
    ROWS = "rows"
    """Every collecting rank returns a `Batch` of its rows: joined in the order of the batch that was split."""
    NONE = "none"
    """Nothing; the call still waits until every rank is done."""


@dataclass(frozen=True, kw_only=True)
class MethodSpec:
    """The dispatch declaration of one method."""

    split: Split = Split.ALL
    join: Join = Join.LIST
    concurrent: bool = False
    """Runs on its own thread, also while the engine thread is busy. Everything else runs on the worker's one engine
    thread, in the order in which it was submitted."""


def dispatch(
    *, split: Split = Split.ALL, join: Join = Join.LIST, concurrent: bool = False
) -> Callable[[_Method], _Method]:
    """Declares how a host's method is called. The method itself is returned unchanged."""
    spec = MethodSpec(split=split, join=join, concurrent=concurrent)

    def mark(method: _Method) -> _Method:
        setattr(method, _ATTRIBUTE, spec)
        return method

    return mark


def asks_whole_groups(arguments: Iterable[Any]) -> bool:
    """Whether one of a call's arguments requires that rows of equal `uid` stay together."""
    return any(getattr(value, "whole_groups", False) for value in arguments)


def methods_of(host: type) -> dict[str, MethodSpec]:
    """Public methods of a host class, with their declarations."""
    found = {name: getattr(host, name) for name in dir(host) if not name.startswith("_")}
    return {name: getattr(value, _ATTRIBUTE, MethodSpec()) for name, value in found.items() if callable(value)}
