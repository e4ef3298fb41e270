"""A batch that was put into the object store once: what crosses afterwards are row numbers.

The controller keeps lengths and row identities, so it can cut and balance without the data. A worker reads the store's
memory in place: all rows, or a run of neighbouring rows, without a copy; other rows are gathered once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rlsdk.cluster.splitting import as_run, split_groups, split_rows
from rlsdk.interfaces import BatchError

if TYPE_CHECKING:
    import torch

    from rlsdk.interfaces import Batch


@dataclass(frozen=True)
class StoredRows:
    """Rows of a stored batch, as a worker is sent them."""

    ref: Any
    """Object reference of the whole batch."""
    rows: Any
    """None for all rows, a `(start, stop)` pair, or a numpy int64 array of row numbers."""

    def load(self) -> Batch:
        """The rows, in this order; tensors are read-only views of the store where no gather was needed."""
        import ray
        import torch

        batch: Batch = ray.get(self.ref)
        if self.rows is None:
            return batch
        if isinstance(self.rows, tuple):
            return batch.select(slice(*self.rows))
        return batch.select(torch.from_numpy(self.rows.copy()))


@dataclass(frozen=True, kw_only=True)
class BatchRef:
    """Rows of a stored batch, as the controller sees them. Made by `Cluster.put`."""

    ref: Any = field(repr=False)
    lengths: torch.Tensor
    """`[B]` int64, tokens in each row."""
    row_ids: torch.Tensor
    """`[B]` int64."""
    uids: torch.Tensor | None = None
    """`[B]` int64, each row's group; None: the batch does not say."""
    rows: torch.Tensor | None = None
    """`[B]` int64, which rows of the stored batch these are; None: all of them."""

    @property
    def num_rows(self) -> int:
        return int(self.lengths.shape[0])

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    def select(self, rows: torch.Tensor | Sequence[int]) -> BatchRef:
        """These rows, in this order. No data moves."""
        import torch

        index = torch.as_tensor(rows, dtype=torch.int64)
        chosen = index if self.rows is None else self.rows[index]
        uids = None if self.uids is None else self.uids[index]
        return replace(self, lengths=self.lengths[index], row_ids=self.row_ids[index], uids=uids, rows=chosen)

    def cut(self, parts: int, *, whole_groups: bool = False) -> list[torch.Tensor | None]:
        """Row numbers of each of `parts` shares of nearly equal token count; None: every row.

        With `whole_groups` rows of equal `uid` go to the same share.

        Raises:
            BatchError: whole groups of a batch without `uid`.
        """
        import torch

        if parts == 1:
            return [None]
        lengths = self.lengths.tolist()
        if not whole_groups:
            cut = split_rows(lengths, parts)
        elif self.uids is None:
            raise BatchError("uid: required here but missing; groups can only be kept whole where rows say theirs")
        else:
            cut = split_groups(lengths, self.uids.tolist(), parts)
        return [torch.tensor(rows, dtype=torch.int64) for rows in cut]

    def part(self, rows: torch.Tensor | None) -> StoredRows:
        """One share of `cut`, as a worker is sent it."""
        return self.stored() if rows is None else self.select(rows).stored()

    def stored(self) -> StoredRows:
        """What a worker is sent."""
        if self.rows is None:
            return StoredRows(self.ref, None)
        rows = self.rows.numpy()
        return StoredRows(self.ref, as_run(rows) or rows)
