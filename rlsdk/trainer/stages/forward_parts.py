"""Computes an output for many rows in several calls, so that a run can stop between two calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from rlsdk.interfaces import Batch

if TYPE_CHECKING:
    from torch import Tensor

    from rlsdk.trainer.roles.session import Session

ROWS_A_CALL = 256
"""Rows of one call: enough that the engine's time far exceeds the controller's milliseconds per call. Even, so that the
two rows of a pair stay together."""


def forward_in_parts(
    session: Session,
    role: str,
    batch: Batch,
    output: str,
    *,
    look: Callable[[], None],
    timeout_s: float | None,
) -> Tensor:
    """Computes an output of all rows without gradients.

    Args:
        session: the session of the role.
        role: name of the role that computes it.
        batch: all rows, with the fields that the role needs.
        output: one of `OUTPUTS`.
        look: called before every part; an exception that it raises ends the computation.
        timeout_s: for each call.

    Returns:
        The same as one `forward` over all rows: flat `[N]`, or `[B]` for `scores`.
    """
    parts = []
    group, method = session.computing(role)
    with session.turns.using(group.name):
        for first in range(0, max(batch.num_rows, 1), ROWS_A_CALL):
            look()
            part = batch.select(slice(first, first + ROWS_A_CALL))
            answer: Batch = group.run(method, session.put(part), {output: output}, timeout_s=timeout_s)
            parts.append(answer[output])
    return torch.cat(parts)
