"""Verifies a sync: compares the sources' fingerprints of what was requested with those of what is served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from rlsdk.interfaces import (
    FINGERPRINT_MODULUS,
    BlockScales,
    Box,
    QuantizedPiece,
    SyncReceipt,
    TensorMeta,
    Transfer,
    WeightLayout,
    WeightSyncError,
)
from rlsdk.sharding.plan.boxes import subtract
from rlsdk.sharding.plan.holders import SourceTensors
from rlsdk.sharding.plan.matching import Sides, match
from rlsdk.sharding.plan.packed_plan import Columns, PackedBuckets
from rlsdk.sharding.plan.scales import QuantizedProof, SharedBlocks

MAX_NAMED = 5
"""Number of tensors that an error names; it counts the others."""
Served: TypeAlias = tuple[tuple[str, str, BlockScales | None, Box], ...]
"""Name, dtype, scales and box of each part that a replica serves."""


@dataclass(frozen=True)
class FingerprintTask:
    """Assignment of fingerprints: the boxes that each source computes, and the replicas that serve them."""

    replicas: tuple[int, ...]
    transfers: tuple[tuple[Transfer, ...], ...]
    """Transfers by source; together they cover the replicas' boxes, each exactly once, in the served dtype. Without
    tensors that the replicas quantize."""
    quantized: QuantizedProof = field(default_factory=QuantizedProof)
    """The same for tensors that the replicas quantize."""

    def total(self, parts: Sequence[Mapping[str, int]]) -> dict[str, int]:
        """The required fingerprint of each tensor: the sum of the sources' parts."""
        totals = {transfer.name: 0 for mine in self.transfers for transfer in mine}
        return added_up(totals, parts)

    def quantized_total(self, parts: Sequence[Mapping[str, int]], shared: Mapping[str, SharedBlocks]) -> dict[str, int]:
        """As `total`, for the quantized tensors and their scales."""
        names = [*self.quantized.tensors, *self.quantized.scales.values()]
        return added_up(dict.fromkeys(names, 0), [*parts, self.quantized.scale_fingerprints(shared)])


def added_up(totals: dict[str, int], parts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Adds fingerprints of parts to `totals`."""
    for part in parts:
        for name, value in part.items():
            totals[name] = (totals[name] + value) % FINGERPRINT_MODULUS
    return totals


def plan_fingerprints(
    source: Sequence[WeightLayout], replicas: Sequence[Sequence[WeightLayout]], *, piece_bytes: int
) -> list[FingerprintTask]:
    """One task for each distinct set of served boxes (one in total if replicas are identical), spread over the sources.

    If several sources hold a box, one that does not send it to a single replica computes its fingerprint: this also
    detects sources that have diverged.
    """
    groups: dict[Served, list[int]] = {}
    for replica, layouts in enumerate(replicas):
        groups.setdefault(_served(layouts), []).append(replica)
    return [_task(members, served, source, piece_bytes) for served, members in groups.items()]


def _served(layouts: Sequence[WeightLayout]) -> Served:
    """The boxes that a replica serves; boxes on several of its places count once."""
    boxes: dict[tuple[str, str, BlockScales | None], list[Box]] = {}
    for layout in layouts:
        kinds = {meta.name: (meta.dtype, meta.scales) for meta in layout.tensors}
        for name, box in layout.boxes:
            seen = boxes.setdefault((name, *kinds[name]), [])
            fresh = [box]
            for other in seen:
                fresh = [part for piece in fresh for part in subtract(piece, other)]
            seen += fresh
    return tuple((*kind, box) for kind, parts in boxes.items() for box in sorted(parts))


def _task(members: Sequence[int], served: Served, source: Sequence[WeightLayout], piece_bytes: int) -> FingerprintTask:
    """The task of replicas that serve the same boxes."""
    held = SourceTensors(source)
    metas = {
        name: TensorMeta(name=name, shape=held.tensors[held.resolve(name)].shape, dtype=dtype, scales=scales)
        for name, dtype, scales, _ in served
    }
    taken = {
        name: meta if meta.scales is None else replace(meta, dtype=meta.scales.taken_as) for name, meta in metas.items()
    }
    by_source = _spread(served, taken, source, held, piece_bytes)
    scales = {name: meta.scales for name, meta in metas.items() if meta.scales is not None}
    if not scales:
        return FingerprintTask(replicas=tuple(members), transfers=by_source)
    return FingerprintTask(
        replicas=tuple(members),
        transfers=tuple(tuple(t for t in mine if t.name not in scales) for mine in by_source),
        quantized=QuantizedProof(
            tensors={name: metas[name] for name in scales},
            pieces=tuple(
                tuple(
                    QuantizedPiece(
                        transfer=t, shape=metas[t.name].shape, block=scales[t.name].block, scales=scales[t.name].name
                    )
                    for t in mine
                    if t.name in scales
                )
                for mine in by_source
            ),
        ),
    )


def _spread(
    served: Served,
    metas: Mapping[str, TensorMeta],
    source: Sequence[WeightLayout],
    held: SourceTensors,
    piece_bytes: int,
) -> tuple[tuple[Transfer, ...], ...]:
    """The boxes, each with one source that holds it; work is spread evenly."""
    nowhere = WeightLayout(
        rank=0,
        node="",
        device="",
        process="",
        tensors=tuple(metas.values()),
        boxes=tuple((name, box) for name, _, _, box in served),
    )
    # Not the source that sends it: a replica that receives everything from one copy would be compared with that copy.
    columns = Columns.of(match(Sides.of(source, [nowhere], held, metas), shift=1).pieces(0))
    mine: list[list[Transfer]] = [[] for _ in source]
    for giver, transfer in PackedBuckets(0, columns, tuple(metas.values()), {}, piece_bytes).transfers():
        mine[giver].append(transfer)
    return tuple(map(tuple, mine))


def check_receipt(receipt: SyncReceipt, expected: Mapping[str, int], version: int, who: str) -> None:
    """Raises `WeightSyncError` unless the receipt proves that `version` is served as the source holds it.

    Args:
        receipt: receipt of one replica.
        expected: fingerprint of every tensor that the replica wants.
        version: the version that was sent.
        who: names the replica in the error.
    """
    if receipt.version != version:
        raise WeightSyncError(f"{who} was sent version {version}, and its receipt is for version {receipt.version}")
    missing = [name for name in expected if name not in receipt.fingerprints]
    if missing:
        raise WeightSyncError(
            f"{who} does not account for {_listed(missing)} in its receipt of version {version}: "
            "update_weights must return a fingerprint of every tensor that layout() lists"
        )
    wrong = [name for name, value in expected.items() if receipt.fingerprints[name] != value]
    if wrong:
        raise WeightSyncError(
            f"{who} does not serve version {version} as it was trained: {_listed(wrong)} of {len(expected)} tensors "
            f"differ from the source (fingerprint of {wrong[0]!r}: served {receipt.fingerprints[wrong[0]]}, trained "
            f"{expected[wrong[0]]}). Samples would come from other weights than the run believes; nothing was generated"
        )


def check_checksums(receipts: Sequence[SyncReceipt], replicas: Sequence[int], version: int, backend: str) -> None:
    """Raises `WeightSyncError` unless the engines' own checksums are equal for replicas that serve the same boxes."""
    said: dict[str, list[int]] = {}
    for replica in replicas:
        if (checksum := receipts[replica].engine_checksum) is not None:
            said.setdefault(checksum, []).append(replica)
    if len(said) > 1:
        sums = "; ".join(f"replicas {same}: {checksum[:16]}" for checksum, same in said.items())
        raise WeightSyncError(
            f"replicas of rollout backend {backend!r} serve different weights after the update to version {version}, "
            f"by the engine's own checksum: {sums}"
        )


def changed_tensors(now: Mapping[str, int], before: Mapping[str, int] | None) -> int:
    """Number of tensors whose fingerprint changed since the last sync; at the first sync all of them."""
    if before is None:
        return len(now)
    return sum(before.get(name) != value for name, value in now.items())


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:MAX_NAMED]))
    rest = len(names) - MAX_NAMED
    return f"{shown} and {rest} more" if rest > 0 else shown
