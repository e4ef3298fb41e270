"""The reshard planner: from source and target layouts to the transfers between them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from rlsdk.interfaces import (
    DTYPE_BYTES,
    Box,
    Bucket,
    ConfigError,
    LayoutError,
    ReshardPlan,
    TensorMeta,
    Transfer,
    Transport,
    WeightLayout,
)
from rlsdk.sharding.boxes import covered_elements, cut
from rlsdk.sharding.holders import Holders, Piece, distances, tied_to

PIECE_BYTES = 4 << 20
"""No box travels in larger pieces: small enough for a cache, and for replicas to share the work evenly."""


@dataclass(frozen=True)
class Want:
    """One box that a target asks for, small enough to travel in one bucket."""

    target: int
    name: str
    """As the target calls it."""
    held: str
    """As the sources call it."""
    box: Box
    dtype: str
    """On the wire."""

    @property
    def num_bytes(self) -> int:
        return self.box.numel * DTYPE_BYTES[self.dtype]


def plan_reshard(
    source: Sequence[WeightLayout],
    target: Sequence[WeightLayout],
    *,
    bucket_bytes: int,
    transports: Sequence[type[Transport]],
) -> ReshardPlan:
    """Plans the moves that give every target what it asks for: each byte once, from the nearest holder.

    Among holders that are equally near, the one that sends least so far is taken, largest pieces first, so replicas of
    the source share the work. The same layouts give the same plan.

    Args:
        source: one per training rank.
        target: one per place that weights are delivered to.
        bucket_bytes: bound on what one target takes at once; a larger box is cut.
        transports: in order of preference; the first that reaches is chosen for each pair.

    Raises:
        LayoutError: a wanted box is held by nobody, shapes or kinds of dtype differ, or a source holds a tensor that
            no target asks for.
    """
    if bucket_bytes < max(DTYPE_BYTES.values()):
        raise ConfigError(f"bucket_bytes is {bucket_bytes}: expected at least {max(DTYPE_BYTES.values())}")
    holders = Holders(source)
    _check_all_wanted(holders, target)
    wire = _wire_tensors(holders, target)
    wants = list(_wants(holders, target, wire, bucket_bytes))
    load = [0] * len(source)
    given = assign(wants, holders, [distances(source, layout) for layout in target], load)
    buckets: list[Bucket] = []
    for index, mine in groupby(zip(wants, given, strict=True), key=lambda entry: entry[0].target):
        pieces = [(want, piece) for want, pieces in mine for piece in pieces]
        names = {s: choose_transport(source[s], target[index], transports) for s in {p.source for _, p in pieces}}
        buckets += _fill(index, pieces, bucket_bytes, names)
    return ReshardPlan(
        tensors=wire,
        buckets=tuple(buckets),
        num_bytes=sum(bucket.num_bytes for bucket in buckets),
        lower_bound_bytes=lower_bound_bytes(source, target),
        moved_bytes=sum(load),
        bucket_bytes=bucket_bytes,
        source_load=dict(enumerate(load)),
    )


def wire_dtype(held: str, wanted: str) -> str:
    """What travels: the wanted dtype, unless it is wider than what is held; widening is exact and costs no bytes."""
    return held if DTYPE_BYTES[wanted] > DTYPE_BYTES[held] else wanted


def lower_bound_bytes(source: Sequence[WeightLayout], target: Sequence[WeightLayout]) -> int:
    """Bytes that targets lack in their own process, counted without planning anything."""
    holders = Holders(source)
    wire = _wire_tensors(holders, target)
    at_home: dict[tuple[str, str], list[Box]] = {}
    for layout in source:
        for name, box in layout.boxes:
            at_home.setdefault((layout.process, name), []).append(box)
    total = 0
    for layout in target:
        for name, box in layout.boxes:
            here = at_home.get((layout.process, holders.resolve(name)), [])
            total += (box.numel - covered_elements(box, here)) * DTYPE_BYTES[wire[name].dtype]
    return total


def _check_all_wanted(holders: Holders, target: Sequence[WeightLayout]) -> None:
    wanted = {holders.resolve(meta.name) for layout in target for meta in layout.tensors}
    tied = tied_to(target)
    for name in sorted(holders.tensors.keys() - wanted):
        if name in tied:
            raise LayoutError(
                f"the source trains {name!r} by itself, but the target serves it tied to {tied[name]!r}: "
                "set tie_word_embeddings alike on both sides"
            )
        raise LayoutError(
            f"the source trains {name!r}, which no target asks for: it would be trained and never served. The rollout "
            "backend's layout() must list every tensor of the model"
        )


def _wire_tensors(holders: Holders, target: Sequence[WeightLayout]) -> dict[str, TensorMeta]:
    """Every wanted tensor with its dtype on the wire."""
    wire: dict[str, TensorMeta] = {}
    for layout in target:
        for meta in layout.tensors:
            held = holders.tensors[holders.resolve(meta.name)]
            if held.shape != meta.shape:
                raise LayoutError(
                    f"{meta.name!r}: the source holds shape {list(held.shape)}, the target wants {list(meta.shape)}"
                )
            if _is_float(held.dtype) != _is_float(meta.dtype):
                raise LayoutError(
                    f"{meta.name!r}: the source holds {held.dtype}, the target wants {meta.dtype}; a cast would change "
                    "the values: the engine must quantize by itself and ask for what it takes"
                )
            travels = TensorMeta(name=meta.name, shape=meta.shape, dtype=wire_dtype(held.dtype, meta.dtype))
            if wire.setdefault(meta.name, travels) != travels:
                raise LayoutError(
                    f"{meta.name!r}: targets want different dtypes, {wire[meta.name].dtype} and {travels.dtype}"
                )
    return wire


def _is_float(dtype: str) -> bool:
    return "float" in dtype


def _wants(
    holders: Holders, target: Sequence[WeightLayout], wire: dict[str, TensorMeta], bucket_bytes: int
) -> Iterator[Want]:
    """Every wanted box in the order of its target, cut to pieces."""
    for index, layout in enumerate(target):
        order = {name: at for at, name in enumerate(dict.fromkeys(name for name, _ in layout.boxes))}
        for name, box in sorted(layout.boxes, key=lambda entry: (order[entry[0]], entry[1])):
            held, dtype = holders.resolve(name), wire[name].dtype
            for part in cut(box, min(bucket_bytes, PIECE_BYTES) // DTYPE_BYTES[dtype]):
                yield Want(index, name, held, part, dtype)


def assign(
    wants: Sequence[Want], holders: Holders, cost: Sequence[Sequence[int]], load: list[int]
) -> list[list[Piece]]:
    """Chooses the givers of every want, largest wants first; adds what crosses processes to `load`.

    Args:
        wants: in any order.
        holders: of the sources.
        cost: `cost[target][source]`; 0 is the same process.
        load: bytes that each source sends; added to in place.

    Returns:
        The pieces of each want, in the order of `wants`.
    """
    given: list[list[Piece]] = [[] for _ in wants]
    for at in sorted(range(len(wants)), key=lambda at: (-wants[at].num_bytes, at)):
        want = wants[at]
        given[at] = holders.assign(want.held, want.box, cost[want.target], load)
        for piece in given[at]:
            if cost[want.target][piece.source]:
                load[piece.source] += piece.box.numel * DTYPE_BYTES[want.dtype]
    return given


def _fill(
    target: int, pieces: Sequence[tuple[Want, Piece]], bucket_bytes: int, transports: Mapping[int, str]
) -> list[Bucket]:
    """The buckets of one target: rounds of at most `bucket_bytes`, in the target's order, one bucket per source."""
    rounds: list[dict[int, list[Transfer]]] = [{}]
    filled = 0
    for want, piece in pieces:
        size = piece.box.numel * DTYPE_BYTES[want.dtype]
        if filled + size > bucket_bytes:
            rounds.append({})
            filled = 0
        transfer = Transfer(name=want.name, box=piece.box, dtype=want.dtype, num_bytes=size)
        rounds[-1].setdefault(piece.source, []).append(transfer)
        filled += size
    return [
        Bucket(
            source=giver,
            target=target,
            transport=transports[giver],
            transfers=tuple(transfers),
            num_bytes=sum(transfer.num_bytes for transfer in transfers),
            round=number,
        )
        for number, by_source in enumerate(rounds)
        for giver, transfers in sorted(by_source.items())
    ]


def choose_transport(source: WeightLayout, target: WeightLayout, transports: Sequence[type[Transport]]) -> str:
    """Name of the first transport that reaches from `source` to `target`."""
    for transport in transports:
        if transport.reaches(source, target):
            return transport.name
    raise LayoutError(
        f"no transport reaches from source rank {source.rank} on {source.node} to target rank {target.rank} on "
        f"{target.node}; known: {[transport.name for transport in transports]}"
    )
