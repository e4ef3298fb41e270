"""Joins the results of many ranks into one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rlsdk.cluster.calls.dispatch import Join, MethodSpec, Split
from rlsdk.interfaces import Batch, BatchError, rejoin

if TYPE_CHECKING:
    import torch

Joiner = Callable[[Mapping[int, Any]], Any]
"""Turns answers by rank into the caller's result."""


def joiner(spec: MethodSpec, collectors: Sequence[int], row_ids: torch.Tensor | None = None) -> Joiner:
    """Returns the function that joins the answers to a method into its result.

    Args:
        spec: the method's declaration.
        collectors: ranks whose results are read, one per data-parallel rank.
        row_ids: `[B]` int64, ids of the rows that were split, in result order; None: rows in rank order.
    """
    if spec.join is Join.ROWS:
        return partial(_rows, collectors, row_ids)
    if spec.join is Join.NONE:
        return _nothing
    if spec.join is Join.FIRST_DONE or spec.split in (Split.RANK_ZERO, Split.ANY):
        return _only
    return partial(_of_rank, collectors[0]) if spec.join is Join.FIRST else _in_rank_order


def _in_rank_order(answers: Mapping[int, Any]) -> list[Any]:
    return [answers[rank] for rank in sorted(answers)]


def _of_rank(rank: int, answers: Mapping[int, Any]) -> Any:
    return answers[rank]


def _only(answers: Mapping[int, Any]) -> Any:
    return next(iter(answers.values()))


def _nothing(answers: Mapping[int, Any]) -> None:
    return None


def _rows(collectors: Sequence[int], row_ids: torch.Tensor | None, answers: Mapping[int, Any]) -> Batch:
    import torch

    parts = [answers[rank] for rank in collectors if rank in answers]
    for part in parts:
        if not isinstance(part, Batch):
            raise BatchError(f"a method that joins rows returns a Batch, got {type(part).__name__}")
    return rejoin(parts, torch.cat([part["row_id"] for part in parts]) if row_ids is None else row_ids)
