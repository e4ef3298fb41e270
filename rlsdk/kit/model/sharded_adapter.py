"""An adapter that is split over ranks, as the weights below it may be."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlsdk.interfaces import Box, ModelSpec, WeightShard, fingerprint
from rlsdk.kit.model import piece_layouts
from rlsdk.kit.model.adapter_files import initial_values, write_adapter
from rlsdk.kit.model.adapters import KeptReference, ModelAdapter, base_digest, count_moved
from rlsdk.kit.model.part_loading import fill_piece
from rlsdk.kit.ranks.error_agreement import raise_on_all_ranks


class Piece(piece_layouts.Piece, Protocol):
    """One rank's part of a parameter, which can be gathered."""

    @property
    def held(self) -> Tensor:
        """All values of this rank: a view."""

    def gather(self, writer: int, dtype: torch.dtype) -> Tensor | None:
        """The whole tensor on rank `writer`; None on the others. Collective: every rank must call."""


P = TypeVar("P", bound=Piece)


class RankAdapter(ABC):
    """One rank's part of an adapter, float32, and of the frozen weights below it."""

    adapter: ModelAdapter
    reference: KeptReference
    copies = 1
    """How often `base_sums` of all ranks count each element of a frozen weight."""
    _digest: str | None = None

    @abstractmethod
    def adapted(self) -> Iterable[tuple[Tensor, Tensor]]:
        """This rank's boxes of the weights that have an adapter: without it, and with it added. Every element is on
        equally many ranks."""

    @abstractmethod
    def gather(self) -> Mapping[str, Tensor | None]:
        """A and B by name, whole and float32 on rank 0; None on the others. Collective: every rank must call."""

    @abstractmethod
    def base_sums(self) -> Mapping[str, int]:
        """Sum of the fingerprints of this rank's boxes of each frozen weight. Collective: every rank must call."""

    def moved_share(self) -> float:
        """See `TrainEngine`."""
        counts = torch.tensor(count_moved(self.adapted()))
        dist.all_reduce(counts)
        return float(counts[0] / counts[1])

    def save(self, path: Path, model: Any, spec: ModelSpec) -> None:
        """Writes PEFT's two files, on rank 0. Collective: every rank must call."""
        tensors = self.gather()
        with raise_on_all_ranks(f"{path} cannot be written"):
            if dist.get_rank() == 0:
                whole = {name: values for name, values in tensors.items() if values is not None}
                write_adapter(path, model, self.adapter, whole, spec)

    def base_digest(self) -> str:
        """Fingerprint of the frozen weights. Collective: every rank must call."""
        if self._digest is None:
            mine = self.base_sums()
            sums = torch.tensor(list(mine.values()))
            dist.all_reduce(sums)
            found = dict(zip(mine, (sums // self.copies).tolist(), strict=True))
            self._digest = base_digest(found, self.adapter.spec)
        return self._digest


class ShardedAdapter(RankAdapter, Generic[P]):
    """A `RankAdapter` of pieces."""

    def __init__(
        self, adapter: ModelAdapter, pieces: Sequence[P], base: Sequence[P], *, copies: int, seed: int
    ) -> None:
        """
        Args:
            adapter: of a model that was split and allocated.
            pieces: of A and B.
            base: of the frozen weights.
            copies: number of ranks that hold each element of a frozen weight.
            seed: of the run.
        """
        self.adapter, self.pieces, self.base, self.copies = adapter, pieces, base, copies
        first = dict(initial_values(adapter.spec, {piece.name: piece.shape for piece in pieces}, seed))
        for piece in pieces:
            fill_piece(piece, first[piece.name])
        self.reference = KeptReference(adapter, {piece.name: piece.held for piece in pieces})

    @abstractmethod
    def merged(self, piece: P) -> Sequence[tuple[Box, Tensor]]:
        """This rank's boxes of a weight, with the adapter added if it has one; no communication."""

    @abstractmethod
    def gather_merged(self, piece: P, writer: int, dtype: torch.dtype) -> Tensor | None:
        """As `Piece.gather`, with the adapter added if the weight has one."""

    def shards(self) -> Iterator[WeightShard]:
        """Weights with the adapter added, in the order of `base`."""
        for piece in self.base:
            for box, values in self.merged(piece):
                yield WeightShard(name=piece.name, box=box, tensor=values)

    def adapted(self) -> Iterator[tuple[Tensor, Tensor]]:
        for piece in self.base:
            if self.adapter.module_of(piece.name) is not None:
                for (_, before), (_, after) in zip(piece.parts, self.merged(piece), strict=True):
                    yield before, after

    def gather(self) -> dict[str, Tensor | None]:
        return {piece.name: piece.gather(0, torch.float32) for piece in self.pieces}

    def base_sums(self) -> dict[str, int]:
        return {piece.name: sum(fingerprint(values, box) for box, values in piece.parts) for piece in self.base}
