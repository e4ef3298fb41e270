"""Agreement on errors between ranks: an error on one rank raises on all, so that no rank hangs in a collective."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from rlsdk.interfaces import CheckpointError, RlsdkError


@contextmanager
def raise_on_all_ranks(what: str) -> Iterator[None]:
    """If the body fails on one rank, raises on every rank. Collective: every rank must enter.

    The body must not contain a collective.

    Args:
        what: begins the message: what failed.

    Raises:
        CheckpointError: the body failed on some rank; the message names each such rank and its error.
    """
    cause: Exception | None = None
    try:
        yield
    except Exception as error:
        cause = error
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, None if cause is None else f"{type(cause).__name__}: {cause}")
    if any(problems):
        if isinstance(cause, CheckpointError):
            raise cause
        messages = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(problems) if text)
        raise CheckpointError(f"{what}: {messages}") from cause


def raise_objective_errors(failures: Sequence[Exception]) -> None:
    """Raises on every rank if the objective raised on any. Collective: every rank must call, after its passes.

    Args:
        failures: what the objective raised on this rank.

    Raises:
        Exception: the first of `failures`, on a rank that has some.
        RlsdkError: on the other ranks; it names the first rank that failed.
    """
    mine = f"{type(failures[0]).__name__}: {failures[0]}" if failures else None
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, mine)
    if failures:
        raise failures[0]
    if failed := [(rank, text) for rank, text in enumerate(messages) if text]:
        raise RlsdkError(f"the objective failed on rank {failed[0][0]}: {failed[0][1]}")
