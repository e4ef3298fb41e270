"""The engine of `mismatched`."""

from __future__ import annotations

from collections.abc import Iterable

from rlsdk.interfaces import SyncReceipt, WeightShard
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine

BITS = 3
"""Of a weight that is served."""


class MismatchedEngine(TransformersRolloutEngine):
    """Rounds each matrix to a few bits after every update, each row by its own largest weight."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        """The receipt is that of what came: what is served differs on purpose."""
        receipt = super().update_weights(shards, version)
        levels = 2 ** (BITS - 1) - 1
        with self.lock:
            for parameter in self.parameters.values():
                if parameter.dim() == 2:
                    step = parameter.data.abs().amax(1, keepdim=True).clamp(min=1e-12) / levels
                    parameter.data.copy_((parameter.data / step).round() * step)
        return receipt
