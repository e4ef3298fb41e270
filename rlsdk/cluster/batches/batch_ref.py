"""Sends rows of a batch to workers as references to stored fields, and row numbers.

The controller keeps the batch, so it can cut and balance, and store for each node no more than that node needs. A
worker reads the store's memory in place: all rows, or a run of neighbouring rows, without a copy; other rows are
gathered once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rlsdk.cluster.batches.splitting import as_run, split_groups, split_near, split_rows
from rlsdk.cluster.batches.stored_fields import Piece, StoredFields, merged
from rlsdk.interfaces import BatchError

if TYPE_CHECKING:
    import torch

    from rlsdk.interfaces import Batch


@dataclass(frozen=True)
class StoredRows:
    """Rows of stored fields, in the form sent to a worker."""

    pieces: tuple[Piece, ...]
    rows: Any
    """None for all rows, a `(start, stop)` pair, or a numpy int64 array of row numbers."""
    meta: Mapping[str, float] = field(default_factory=dict)
    of_node: bool = False
    """True: the pieces hold only the rows of one node's workers; False: the whole batch, stored once for all nodes."""

    def load(self) -> Batch:
        """Loads the rows, in this order; tensors are read-only views of the store if no gather is needed."""
        import ray
        import torch

        found = ray.get([ref for ref, _ in self.pieces])
        batch = merged([(part, names) for part, (_, names) in zip(found, self.pieces, strict=True)], self.meta)
        if self.rows is None:
            return batch
        if isinstance(self.rows, tuple):
            return batch.select(slice(*self.rows))
        return batch.select(torch.from_numpy(self.rows.copy()))

    def stored_again(self) -> StoredRows:
        """The same rows in an object of this process: workers that read it ask this process for it."""
        import ray

        batch = self.load()
        return StoredRows(((ray.put(batch), (*batch.tokens, *batch.rows)),), None, self.meta)


@dataclass(frozen=True, kw_only=True)
class BatchRef:
    """Rows of a batch, as the controller sees them. Made by `Cluster.put`; stored when a call first needs it."""

    batch: Batch = field(repr=False)
    """The whole batch, in the controller."""
    fields: StoredFields = field(repr=False)
    lengths: torch.Tensor
    """`[B]` int64, tokens in each row."""
    row_ids: torch.Tensor
    """`[B]` int64."""
    rows: torch.Tensor | None = None
    """`[B]` int64, which rows of `batch` these are; None: all of them."""

    @classmethod
    def of(cls, batch: Batch, fields: StoredFields) -> BatchRef:
        """Every row of a batch."""
        return cls(batch=batch, fields=fields, lengths=batch.lengths, row_ids=batch["row_id"])

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
        return replace(self, lengths=self.lengths[index], row_ids=self.row_ids[index], rows=chosen)

    def cut(self, parts: int, *, whole_groups: bool = False) -> list[list[int]] | None:
        """Row numbers of each of `parts` shares of nearly equal token count; None: one share of every row.

        With `whole_groups` rows of equal `uid` go to the same share; without, where that is nearly as even.

        Raises:
            BatchError: whole groups of a batch without `uid`.
        """
        if parts == 1:
            return None
        lengths, uids = self.lengths.tolist(), self.batch.rows.get("uid")
        if uids is None and whole_groups:
            raise BatchError("uid: required here but missing; groups can only be kept whole where rows say theirs")
        if uids is None:
            return split_rows(lengths, parts)
        groups = (uids if self.rows is None else uids[self.rows]).tolist()
        return (split_groups if whole_groups else split_near)(lengths, groups, parts)

    def stored(self) -> StoredRows:
        """All of these rows, for a worker that reads them from the stored whole batch."""
        return self._within(self.fields.pieces(self.batch), None if self.rows is None else self.rows.numpy())

    def shares(
        self, cut: Sequence[Sequence[int]] | None, nodes: Sequence[frozenset[str]]
    ) -> list[dict[str, StoredRows]]:
        """The stored rows of each share of `cut`, for each node whose workers need it.

        If all workers are on one node, they read from the whole batch, which is stored once. Otherwise a node is sent
        only the rows of its own shares.

        Args:
            cut: result of `cut`.
            nodes: nodes that need each share.
        """
        if cut is None:
            return [dict.fromkeys(nodes[0], self.stored())]
        if len(frozenset().union(*nodes)) == 1:
            rows = [self._numbers(share).numpy() for share in cut]
            pieces = self.fields.pieces(self.batch)
            return [dict.fromkeys(on, self._within(pieces, part)) for part, on in zip(rows, nodes, strict=True)]
        return self._by_node(cut, nodes)

    def _by_node(self, cut: Sequence[Sequence[int]], nodes: Sequence[frozenset[str]]) -> list[dict[str, StoredRows]]:
        needed: dict[str, list[int]] = {}
        for at, on in enumerate(nodes):
            for node in on:
                needed.setdefault(node, []).append(at)
        found: list[dict[str, StoredRows]] = [{} for _ in cut]
        for node, shares in needed.items():
            pieces = self.fields.pieces(self.batch, self._numbers([row for at in shares for row in cut[at]]))
            start = 0
            for at in shares:
                stop = start + len(cut[at])
                found[at][node] = StoredRows(pieces, (start, stop), self.batch.meta, of_node=True)
                start = stop
        return found

    def _numbers(self, share: Sequence[int]) -> torch.Tensor:
        """Row numbers in `batch` of a share."""
        import torch

        index = torch.tensor(share, dtype=torch.int64)
        return index if self.rows is None else self.rows[index]

    def _within(self, pieces: tuple[Piece, ...], rows: Any) -> StoredRows:
        return StoredRows(pieces, None if rows is None else as_run(rows) or rows, self.batch.meta)
