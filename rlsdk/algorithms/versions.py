"""Policy versions of the samples of a step."""

from __future__ import annotations

from rlsdk.algorithms.reductions import Samples
from rlsdk.interfaces import Batch, BatchError


def count_stale(batch: Batch, current_version: int) -> int:
    """Number of samples of which a token was sampled with weights older than the current ones.

    Args:
        batch: with `policy_version` and `last_policy_version`: versions of each row's first and last sampled token,
            -1 where the policy sampled none.
        current_version: version of the weights before the step's first update.

    Raises:
        BatchError: a row has a version newer than the current one, or its last token is older than its first.
    """
    first, last = batch["policy_version"], batch["last_policy_version"]
    if not len(first):
        return 0
    newest = int(last.max())
    if newest > current_version:
        raise BatchError(f"policy_version: a row is of version {newest}, newer than the current {current_version}")
    if bool((first > last).any()):
        at = int((first > last).nonzero()[0])
        raise BatchError(
            f"policy_version: row {at} begins at version {int(first[at])} and ends at {int(last[at])}; versions must "
            "not decrease within a row"
        )
    stale = (first >= 0) & (first < current_version)
    return int((Samples.of(batch).sum(stale.long()) > 0).sum())
