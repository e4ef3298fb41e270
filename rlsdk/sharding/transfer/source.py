"""The training side of a sync: provides buckets, and the expected fingerprints of the weights."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from rlsdk.interfaces import (
    FINGERPRINT_MODULUS,
    Box,
    Bucket,
    LayoutError,
    QuantizedPiece,
    Transfer,
    WeightLayout,
    WeightShard,
    WeightSyncError,
    fingerprint,
)
from rlsdk.kit.ranks.progress import advance
from rlsdk.kit.weights.block_scales import block_maxima, blocks_of, quantize, scales_of, shared_blocks, whole_blocks
from rlsdk.sharding.plan.scales import Maxima
from rlsdk.sharding.transfer.devices import on_physical_device
from rlsdk.sharding.transports.ring_transport import RingTransport
from rlsdk.sharding.transports.table import make_transport
from rlsdk.sharding.transports.transport import Outgoing, Transport


class Held(Protocol):
    """The part of a `TrainEngine` that weights are taken from."""

    def layout(self) -> WeightLayout: ...

    def shards(self) -> Iterator[WeightShard]: ...


class WeightSource:
    """One per rank of a train engine. `export` may be called from a thread other than the engine's, by one thread at
    once, while the engine itself is idle. The engine's memory is held only until the target has taken the bucket."""

    def __init__(self, engine: Held, accelerators: Sequence[str] = ()) -> None:
        """`accelerators`: as in `RankContext`."""
        self._engine = engine
        self._accelerators = accelerators
        self._lock = threading.Lock()
        self._layout: WeightLayout | None = None
        self._places: dict[str, list[int]] = {}
        self._transports: dict[tuple[int, ...], Transport] = {}
        """By the targets that each serves."""
        self._sync_of: WeakKeyDictionary[Transport, str] = WeakKeyDictionary()
        self._over: deque[str] = deque(maxlen=16)
        """Syncs after which another one began."""
        self._copies: list[WeightShard] = []
        """One per box of the layout, kept from sync to sync: the copy that syncs use."""
        self._kept: deque[list[WeightShard]] = deque()
        """All copies, oldest first."""
        self._sent: dict[int, torch.dtype] = {}
        """Position in the layout -> dtype in which syncs have requested the box."""
        self._narrowed: set[int] = set()
        """Positions whose newest copy is of a narrower dtype than the engine's."""
        self._holds = False

    def hold(self, keep: int = 1) -> None:
        """Copies the current weights. Until `release`, syncs use the copy, and the engine may train. The newest `keep`
        copies are kept; see `use_copy`.

        The copy has the dtypes that earlier syncs requested: for example bfloat16 for float32 weights that are served
        in bfloat16. Its memory is kept for the next time.
        """
        with self._lock, torch.no_grad():
            self._copies = self._kept.popleft() if len(self._kept) >= keep else []
            self._kept.append(self._copies)
            for at, shard in enumerate(self._engine.shards()):
                own = shard.tensor.dtype
                dtype = self._sent.get(at, own)
                if torch.promote_types(dtype, own) != own:
                    dtype = own  # the receiver converts it to a wider dtype
                (self._narrowed.add if dtype != own else self._narrowed.discard)(at)
                if at == len(self._copies):
                    self._copies.append(_copied(shard, dtype))
                elif self._copies[at].tensor.dtype != dtype:
                    self._copies[at] = _copied(shard, dtype)
                else:
                    self._copies[at].tensor.copy_(shard.tensor)
            self._holds = True

    def use_copy(self, back: int) -> None:
        """Lets syncs use an older copy, made `back` calls of `hold` before the newest one."""
        with self._lock:
            self._copies = self._kept[-1 - back]
            self._holds = True

    def held_bytes(self) -> int:
        """Memory of all copies, in bytes."""
        return sum(copy.tensor.nbytes for copies in self._kept for copy in copies)

    def release(self) -> None:
        """Lets syncs use the engine's own weights again; the copy's memory is kept."""
        with self._lock:
            self._holds = False

    def layout(self) -> WeightLayout:
        """The layout of this rank's weights."""
        if self._layout is None:
            self._layout = on_physical_device(self._engine.layout(), self._accelerators)
            places = defaultdict(list)
            for at, (name, _) in enumerate(self._layout.boxes):
                places[name].append(at)
            self._places = dict(places)
        return self._layout

    def export(self, buckets: Sequence[Bucket], sync: str = "") -> Sequence[Mapping[str, Any]]:
        """Makes the bytes of one target's buckets available through their transport; returns the handle of each for
        `Transport.fetch`.

        Args:
            buckets: buckets of one target and transport.
            sync: unique name of the sync; empty: not known.

        Raises:
            WeightSyncError: another sync has begun since this one.
        """
        with self._lock:
            transport = self._transport(buckets[0])
            self._begin_sync(transport, sync)
            pieces = iter(self._pieces([transfer for bucket in buckets for transfer in bucket.transfers]))
            outgoing = [
                Outgoing.of(list(islice(pieces, len(bucket.transfers))), [t.dtype for t in bucket.transfers])
                for bucket in buckets
            ]
            if isinstance(transport, RingTransport) and transport.num_readers > 1:
                return transport.export(outgoing, buckets[0].readers.index(buckets[0].target))
            return transport.export(outgoing)

    def _begin_sync(self, transport: Transport, sync: str) -> None:
        """Nothing of a sync that was broken off stays where a target could take it for the next one's."""
        if sync in self._over:
            raise WeightSyncError("a target that broke off asked for weights of a sync that is over")
        before = self._sync_of.get(transport, "")
        if sync and before not in ("", sync):
            if before not in self._over:
                self._over.append(before)
            transport.start_sync()
        self._sync_of[transport] = sync or before

    def _transport(self, bucket: Bucket) -> Transport:
        """The transport to a bucket's target, or to all that share its ring."""
        group, own, name = bucket.readers, (bucket.target,), bucket.transport
        if len(group) > 1:
            shared = self._transports.setdefault(group, make_transport(name, len(group)))
            if shared.name == name:
                return shared
        for others, shared in self._transports.items() if group else ():
            if others != own and bucket.target in others and isinstance(shared, RingTransport):
                # It could not open the memory or the pipes of that ring.
                shared.leave(others.index(bucket.target))
        transport = self._transports.get(own)
        if transport is not None and (transport.name != name or group == own):
            # A target that asks for another one could not use the first, whose resources are freed.
            transport.close()
            transport = None
        if transport is None:
            transport = self._transports[own] = make_transport(name)
        return transport

    def fingerprints(self, transfers: Sequence[Transfer]) -> dict[str, int]:
        """Fingerprint of each name over the given boxes, in their dtypes; those of one name are summed. Buckets may be
        exported meanwhile."""
        with self._lock:
            pieces = self._pieces(transfers)
        totals: dict[str, int] = {}
        for transfer, piece in zip(transfers, pieces, strict=True):
            advance()
            found = fingerprint(piece.tensor.to(getattr(torch, transfer.dtype)), piece.box)
            totals[transfer.name] = (totals.get(transfer.name, 0) + found) % FINGERPRINT_MODULUS
        return totals

    def block_maxima(self, pieces: Sequence[QuantizedPiece]) -> list[Maxima]:
        """See `WeightSourceHost.weight_block_maxima`."""
        found = []
        masks = [shared_blocks(piece.transfer.box, piece.block, piece.shape) for piece in pieces]
        taken = self._taken([piece for piece, mask in zip(pieces, masks, strict=True) if mask.any()])
        for mask in masks:
            if not mask.any():
                found.append(np.zeros(0, np.float32))
                continue
            piece, values = next(taken)
            found.append(block_maxima(values, piece.transfer.box, piece.block).cpu()[mask].numpy())
        return found

    def block_fingerprints(self, pieces: Sequence[QuantizedPiece], maxima: Sequence[Maxima]) -> dict[str, int]:
        """See `WeightSourceHost.weight_block_fingerprints`."""
        totals: dict[str, int] = {}
        for (piece, taken), most in zip(self._taken(pieces), maxima, strict=True):
            box, block = piece.transfer.box, piece.block
            maxima_here = block_maxima(taken, box, block)
            # Copied, because an array from another process may be read-only.
            shared = shared_blocks(box, block, piece.shape).to(taken.device)
            maxima_here[shared] = torch.tensor(most, device=taken.device)
            scales, own = scales_of(maxima_here), whole_blocks(box, block, piece.shape)
            found = {piece.transfer.name: fingerprint(quantize(taken, scales, box, block), box)}
            if own.numel:
                found[piece.scales] = fingerprint(scales[own.slices(within=blocks_of(box, block))], own)
            for name, value in found.items():
                totals[name] = (totals.get(name, 0) + value) % FINGERPRINT_MODULUS
        return totals

    def _taken(self, pieces: Sequence[QuantizedPiece]) -> Iterator[tuple[QuantizedPiece, Tensor]]:
        """Yields each piece with its values before quantization."""
        with self._lock:
            shards = self._pieces([piece.transfer for piece in pieces])
        for piece, shard in zip(pieces, shards, strict=True):
            advance()
            yield piece, shard.tensor.to(getattr(torch, piece.transfer.dtype))

    def close(self) -> None:
        """Frees the memory that transports hold."""
        with self._lock:
            for transport in self._transports.values():
                transport.close()
            self._transports.clear()

    def _pieces(self, transfers: Sequence[Transfer]) -> list[WeightShard]:
        """A view of the engine's memory for each transfer."""
        places = [self._place(transfer) for transfer in transfers]
        shards = self._take(places)
        for transfer, at in zip(transfers, places, strict=True):
            self._note(at, transfer, shards[at])
        return [
            WeightShard(name=t.name, box=t.box, tensor=shards[at].tensor[t.box.slices(within=shards[at].box)].detach())
            for t, at in zip(transfers, places, strict=True)
        ]

    def _note(self, at: int, transfer: Transfer, shard: WeightShard) -> None:
        """Records the dtype in which a box is requested.

        Raises:
            LayoutError: the current copy has a narrower dtype.
        """
        wanted = getattr(torch, transfer.dtype)
        known = self._sent.get(at, wanted)
        self._sent[at] = wanted if known == wanted else torch.promote_types(known, wanted)
        held = shard.tensor.dtype
        if self._holds and at in self._narrowed and torch.promote_types(held, wanted) != held:
            raise LayoutError(
                f"{transfer.name!r} is asked for in {transfer.dtype}, and held in {held}, in which it "
                "was asked for before: another replica wants another dtype. Serve all replicas in one (model.dtype)"
            )

    def _take(self, places: Iterable[int]) -> dict[int, WeightShard]:
        """The engine's shards at these positions. Requested every time: an engine may move its memory between
        syncs, and a view kept here would keep offloaded memory alive."""
        wanted = set(places)
        last = max(wanted, default=-1)
        found = {}
        for at, shard in enumerate(self._copies if self._holds else self._engine.shards()):
            if at in wanted:
                found[at] = shard
            if at >= last:
                break
        return found

    def _place(self, transfer: Transfer) -> int:
        """Position in the layout of the box that contains a transfer's."""
        layout = self.layout()
        name = transfer.name if transfer.name in self._places else layout.tied.get(transfer.name, transfer.name)
        for at in self._places.get(name, ()):
            if _contains(layout.boxes[at][1], transfer.box):
                return at
        raise LayoutError(
            f"rank {layout.rank} was asked for {transfer.name!r} at offset {list(transfer.box.offset)} of size "
            f"{list(transfer.box.size)}, which it does not hold: the plan was made for other layouts"
        )


def _copied(shard: WeightShard, dtype: torch.dtype) -> WeightShard:
    return replace(shard, tensor=shard.tensor.detach().to(dtype, copy=True))


def _contains(outer: Box, inner: Box) -> bool:
    return all(
        o <= i and i + m <= o + n for o, n, i, m in zip(outer.offset, outer.size, inner.offset, inner.size, strict=True)
    )
