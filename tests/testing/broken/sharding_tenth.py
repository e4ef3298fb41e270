"""Sharding managers of the tenth blind trial."""

from __future__ import annotations

from collections.abc import Mapping

from broken.sharding_tools import Checked
from rlsdk.interfaces import SyncReceipt


class ComparesWhatChanged(Checked):
    """From the second sync on, fingerprints are compared of tensors that changed at the source alone: the others were
    proven before."""

    def prove(self, receipt: SyncReceipt, expected: Mapping[str, int], version: int) -> bool:
        before = self._last[1] if self._last else {}
        return super().prove(receipt, {n: v for n, v in expected.items() if before.get(n) != v}, version)


class TrustsTiedCopies(Checked):
    """A replica's own copy of a tied tensor is not compared: the tensor that it is a copy of is."""

    def prove(self, receipt: SyncReceipt, expected: Mapping[str, int], version: int) -> bool:
        tied = {alias: owner for layout in self.ends().source for alias, owner in layout.tied.items()}
        return super().prove(receipt, {n: v for n, v in expected.items() if tied.get(n) not in expected}, version)
