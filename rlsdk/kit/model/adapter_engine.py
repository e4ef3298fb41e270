"""Train engines that may have an adapter: the methods that need nothing of an engine but its adapter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rlsdk.interfaces import Batch, TrainEngine
from rlsdk.kit.model.sharded_adapter import RankAdapter


class AdapterEngine(TrainEngine):
    """One rank of an engine whose adapter, if there is one, is a `RankAdapter`."""

    adapter: Any = None
    """A `RankAdapter`; None: all weights are trained."""

    def settled_adapter(self) -> RankAdapter:
        """The adapter, with the values of the last step: an engine whose step ends later waits for it here."""
        adapter: RankAdapter | None = self.adapter
        assert adapter is not None
        return adapter

    def forward_reference(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        with self.settled_adapter().reference.in_use():
            return self.forward(batch, outputs)

    def keep_reference(self) -> None:
        self.settled_adapter().reference.keep()

    def moved_share(self) -> float:
        return self.settled_adapter().moved_share()

    def below_adapter(self) -> tuple[str | None, dict[str, Tensor]]:
        """What a checkpoint holds because of the adapter: the fingerprint of the frozen weights below it, and this
        rank's values of the one that the reference has. Collective: every rank must call."""
        if self.adapter is None:
            return None, {}
        adapter = self.settled_adapter()
        return adapter.base_digest(), adapter.reference.values
