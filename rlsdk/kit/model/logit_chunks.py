"""Number of logits in memory at once. Imports no torch."""

from __future__ import annotations

MAX_LOGITS = {"cpu": 1 << 25}
"""Per kind of device; on those not listed, `MAX_LOGITS_ON_DEVICES`."""
MAX_LOGITS_ON_DEVICES = 1 << 28
"""1 GiB in float32. Matrix products of fewer tokens wait for the memory of the weight and of its gradient."""


def chunk_tokens(vocabulary: int, device: str) -> int:
    """Number of tokens whose logits are in memory at once; `device` as in `RankContext.device`."""
    return max(MAX_LOGITS.get(device.partition(":")[0], MAX_LOGITS_ON_DEVICES) // max(vocabulary, 1), 1)
