"""Requirements on plans: sources and targets of transfers, their order, and the plan's own numbers."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from rlsdk.interfaces import (
    DTYPE_BYTES,
    Box,
    ConfigError,
    LayoutError,
    RlsdkError,
    TensorMeta,
    WeightLayout,
)
from rlsdk.testing.sharding.counts import (
    HERE,
    distance,
    lacking_bytes,
    not_once,
    out_of_order,
    sent_from_afar,
    transfer_bytes,
    wrong_fields,
)
from rlsdk.testing.sharding.lab import ShardingLab, wanted_boxes, wire_dtypes
from rlsdk.testing.sharding.layouts import (
    Pair,
    apart,
    chain,
    complete,
    copies,
    cut,
    distant_pairs,
    pairs,
    sharded,
    tied,
    with_head,
)
from rlsdk.testing.sharding.tensor_engines import tensor_layout
from rlsdk.testing.suites.requirements import Measured, requirement

MOST_OVER_SHARE = 1.6
"""Largest load of a source relative to an equal share: pieces cannot be divided at will."""


class PlanRequirements:
    """Mixed into `ShardingConformance`."""

    @requirement("plan.cover")
    def test_cover(self, lab: ShardingLab, measured: Measured) -> None:
        """Every wanted element is sent exactly once."""
        for name, pair in {**pairs(), **distant_pairs()}.items():
            measured.none(f"elements not sent once: {name}", not_once(lab.plan(pair), pair.target))

    @requirement("plan.bytes")
    def test_bytes(self, lab: ShardingLab, measured: Measured) -> None:
        """The fewest possible bytes cross process boundaries; sums are right, and bucket sizes are bounded."""
        for name, pair in {**pairs(), **distant_pairs()}.items():
            plan, wire = lab.plan(pair), wire_dtypes(pair.source, pair.target)
            wanted = sum(box.numel * DTYPE_BYTES[wire[tensor]] for _, tensor, box in wanted_boxes(pair))
            sent = [(bucket, sum(map(transfer_bytes, bucket.transfers))) for bucket in plan.buckets]
            away = sum(n for bucket, n in sent if distance(pair, bucket.source, bucket.target) != HERE)
            measured.equal(f"bytes: {name}", plan.num_bytes, wanted)
            measured.equal(f"bytes of its buckets: {name}", sum(num_bytes for _, num_bytes in sent), wanted)
            measured.equal(f"lower bound: {name}", plan.lower_bound_bytes, lacking_bytes(pair, wire))
            measured.equal(f"bytes that cross, as the plan says: {name}", plan.moved_bytes, away)
            measured.equal(f"bytes that cross: {name}", away, lacking_bytes(pair, wire))
            bound = lab.suite.bucket_bytes or plan.bucket_bytes
            measured.at_most(f"largest bucket: {name}", max(num_bytes for _, num_bytes in sent), bound)
            rounds: Counter[tuple[int, int]] = Counter()
            for bucket, num_bytes in sent:
                rounds[bucket.target, bucket.round] += num_bytes
            measured.at_most(f"largest round: {name}", max(rounds.values()), bound)

    @requirement("plan.fields", since=(2, 0))
    def test_fields(self, lab: ShardingLab, measured: Measured) -> None:
        """A transfer is a part of one box of its source, in the dtype of transfers, and every count is right; a target
        forwards only to targets with equal needs, and the first of a chain receives from the sources."""
        for name, pair in {**pairs(), **distant_pairs(), "a chain": chain(), "apart": apart()}.items():
            measured.none(f"fields that are wrong: {name}", list(wrong_fields(lab.plan(pair), pair)))

    @requirement("plan.order", since=(2, 0))
    def test_order(self, lab: ShardingLab, measured: Measured) -> None:
        """A target's buckets are ordered by round, with one per source in a round, and pieces of one tensor are
        contiguous."""
        for name, pair in pairs().items():
            measured.none(f"out of order: {name}", list(out_of_order(lab.plan(pair).parts)))

    @requirement("plan.near", since=(2, 0))
    def test_near(self, lab: ShardingLab, measured: Measured) -> None:
        """The nearest rank that holds a piece sends it: same process, same device, same node, any other."""
        for name, pair in {**pairs(), **distant_pairs()}.items():
            measured.none(f"sent from afar: {name}", list(sent_from_afar(lab.plan(pair), pair)))

    @requirement("plan.spread")
    def test_spread(self, lab: ShardingLab, measured: Measured) -> None:
        """If there are copies of a shard, each sends a part: no rank sends much more than an equal share."""
        for number, replicas in ((2, 2), (4, 1), (4, 4)):
            pair = copies(number, replicas)
            loads = Counter(dict.fromkeys(range(len(pair.source)), 0))
            for bucket in lab.plan(pair).buckets:
                loads[bucket.source] += sum(map(transfer_bytes, bucket.transfers))
            for shard in range(2):
                mine = [loads[source] for source in range(shard, len(pair.source), 2)]
                over = max(mine) / (sum(mine) / len(mine))
                measured.at_most(f"largest load over a share, {number} copies", over, MOST_OVER_SHARE)
        # Every rank has all tensors but the experts, and these in equal shares.
        pair = pairs()["expert parallel to tensor parallel"]
        loads = Counter(dict.fromkeys(range(len(pair.source)), 0))
        for bucket in lab.plan(pair).buckets:
            for transfer in bucket.transfers:
                loads[bucket.source] += transfer_bytes(transfer) if len(transfer.box.size) < 3 else 0
        over = max(loads.values()) / (sum(loads.values()) / len(loads))
        measured.at_most("largest load over a share, of tensors that every rank has", over, MOST_OVER_SHARE)

    @requirement("plan.huge", since=(2, 0))
    def test_huge(self, lab: ShardingLab, measured: Measured) -> None:
        """Counts of tensors of more than 2**32 bytes are right."""
        shape = (96, 16384, 4096)
        metas = [TensorMeta(name="experts", shape=shape, dtype="bfloat16")]
        source = [
            tensor_layout(metas, [("experts", box)], rank=rank, process=f"train:{rank}")
            for rank, box in enumerate(cut(shape, 0, 2))
        ]
        target = [tensor_layout(metas, [("experts", Box.whole(shape))], process="rollout:0")]
        manager = lab.trial(pairs()["one rank to one"], bucket_bytes=1 << 30).manager
        plan, expected = manager.plan(tuple(source), tuple(target)), 2 * math.prod(shape)
        measured.equal("bytes", plan.num_bytes, expected)
        measured.equal("bytes that cross", plan.moved_bytes, expected)
        measured.equal("lower bound", plan.lower_bound_bytes, expected)
        measured.equal("bytes of its buckets", sum(bucket.num_bytes for bucket in plan.buckets), expected)
        measured.equal("bytes that the sources send", sum(plan.source_load.values()), expected)
        boxes = [transfer.box for bucket in plan.buckets for transfer in bucket.transfers]
        measured.equal("elements of its boxes", sum(box.numel for box in boxes), math.prod(shape))
        measured.equal("boxes that come again", len(boxes) - len({(box.offset, box.size) for box in boxes}), 0)

    @requirement("plan.pure")
    def test_pure(self, lab: ShardingLab, measured: Measured) -> None:
        """Equal layouts give equal plans, also given as lists, which do not change; planning calls no rank, and a plan
        can be sent to another process."""
        pair = pairs()["four copies to four replicas"]
        trial = lab.trial(pair)
        first, second = trial.plan(), lab.plan(pair)
        assert list(first.buckets) == list(second.buckets), "two plans of the same layouts differ"
        assert first.num_bytes == second.num_bytes
        rotated = Pair(source=[*pair.source[1:], pair.source[0]], replicas=pair.replicas)
        source, target = list(rotated.source), rotated.target
        given = trial.manager.plan(source, target)
        measured.equal("lists that planning changed", (source != rotated.source) + (target != rotated.target), 0)
        assert list(given.buckets) == list(lab.plan(rotated).buckets), "lists and tuples of layouts give other plans"
        measured.none("calls of ranks that planning made", trial.train.calls + trial.rollout.calls)
        sent = pickle.loads(pickle.dumps(first))
        assert list(sent.buckets) == list(first.buckets), "a plan is another one after pickling"

    @requirement("plan.any_layouts", since=(2, 0))
    def test_any_layouts(self, lab: ShardingLab, measured: Measured) -> None:
        """A manager plans for the given layouts: earlier plans have no effect, even if the caller uses a list again."""
        one = pairs()["sharded to whole, two replicas"]
        others = {
            **{name: pairs()[name] for name in ("sharded to tensor parallel", "copies of shards to whole")},
            "another dtype": Pair(source=one.source, replicas=[complete(0, "bfloat16"), complete(1, "bfloat16")]),
            "other processes": Pair(
                source=[replace(layout, process=f"rollout-0:{layout.rank}") for layout in one.source],
                replicas=one.replicas,
            ),
            "replicas of two dtypes, sent in one": Pair(
                source=sharded(4, dtype="bfloat16"), replicas=[complete(0), complete(1, "bfloat16")]
            ),
            "ranks in another order": Pair(source=one.source[::-1], replicas=one.replicas),
            "the first again": one,
        }
        manager = lab.trial(one).manager
        manager.plan(tuple(one.source), tuple(one.target))
        with suppress(LayoutError):
            manager.plan(tuple(one.source[1:]), tuple(one.target))
        stale, source, target = [], list(one.source), list(one.target)
        manager.plan(source, target)
        for name, pair in others.items():
            source[:], target[:] = pair.source, pair.target
            expected = list(lab.plan(pair).buckets)
            for how, given in {"tuples": (tuple(source), tuple(target)), "lists used again": (source, target)}.items():
                stale += [f"{name}, {how}"] if list(manager.plan(*given).buckets) != expected else []
        measured.none("plans that are not for these layouts", stale)

    @requirement("plan.transports", since=(2, 0))
    def test_transports(self, lab: ShardingLab, measured: Measured) -> None:
        """`transports` names the allowed transports, even if none of them reaches a target; one that does not exist is
        a ConfigError."""
        pair = pairs()["sharded to whole, two replicas"]
        plan = lab.trial(pair, transports=("object_store",)).plan()
        used = {bucket.transport for bucket in plan.buckets}
        measured.none("transports that were not allowed", sorted(used - {"object_store"}))
        with suppress(RlsdkError):
            plan = lab.trial(pair, transports=("in_process",)).plan()
            used = {bucket.transport for bucket in plan.buckets}
            measured.none("transports that were not allowed, as none reaches", sorted(used - {"in_process"}))
        accepted = []
        with suppress(ConfigError):
            lab.trial(pair, transports=("carrier_pigeon",)).plan()
            accepted.append("carrier_pigeon")
        measured.none("accepted", accepted)

    @requirement("plan.refusals")
    def test_refusals(self, lab: ShardingLab, measured: Measured) -> None:
        """A box that no rank holds, an unknown name, a different shape (of any target), rows beyond the tensor, and a
        tied name that not every rank with the tensor lists, are a LayoutError."""
        pair = pairs()["sharded to whole, two replicas"]
        experts = pairs()["expert parallel to tensor parallel"]
        self._refused(
            lab,
            measured,
            {
                "a rank is missing": (pair.source[1:], pair.target),
                "an expert is missing": (
                    [_without_box(layout, "layers.0.experts.up", 1) for layout in experts.source],
                    experts.target,
                ),
                "a name is unknown": (pair.source, [_renamed(layout) for layout in pair.target]),
                "a shape differs": ([_reshaped(layout, 13) for layout in pair.source], pair.target),
                "a tied name that one rank lists": ([*sharded(2)[:1], *tied(sharded(2)[1:])], with_head(complete(0))),
                "a shape of as many elements": (pair.source, [_turned(layout) for layout in pair.target]),
                "a vector as a column": (pair.source, [_as_column(layout) for layout in pair.target]),
                "a name is unknown, beside all that are known": (pair.source, with_head(complete(0))),
                "the last target's shape differs": (pair.source, [*pair.target[:1], _reshaped(pair.target[1], 13)]),
                "rows beyond the tensor": (pair.source, [_beyond(layout) for layout in pair.target]),
                "ranks differ in a shape": (
                    [_reshaped(pair.source[0], 13), *pair.source[1:]],
                    pair.target,
                ),
            },
        )

    @requirement("plan.served", since=(2, 0))
    def test_served(self, lab: ShardingLab, measured: Measured) -> None:
        """Trained weights that could not be served as trained are a LayoutError: a tensor that no target wants, a head
        that is tied only on the serving side, integers instead of floats."""
        source = sharded(2)
        self._refused(
            lab,
            measured,
            {
                "nobody asks for a tensor": (source, [_without(layout, "norm.weight") for layout in complete(0)]),
                "tied on the serving side only": (with_head(sharded(1)), tied(complete(0))),
                "whole numbers": (source, complete(0, "int8")),
                "whole numbers at the last target": (source, [*complete(0), *complete(1, "int8")]),
            },
        )

    def _refused(
        self,
        lab: ShardingLab,
        measured: Measured,
        wrong: Mapping[str, tuple[Sequence[WeightLayout], Sequence[WeightLayout]]],
    ) -> None:
        accepted = []
        for name, (source, target) in wrong.items():
            with suppress(LayoutError):
                plan = lab.trial(pairs()["one rank to one"]).manager.plan(tuple(source), tuple(target))
                accepted += [name] if plan.buckets else []
        measured.none("accepted", accepted)


def _changed(layout: WeightLayout, change: Callable[[TensorMeta], TensorMeta]) -> WeightLayout:
    return replace(layout, tensors=tuple(map(change, layout.tensors)))


def _renamed(layout: WeightLayout) -> WeightLayout:
    names = {"norm.weight": "norms.weight"}
    boxes = tuple((names.get(name, name), box) for name, box in layout.boxes)
    return replace(_changed(layout, lambda meta: replace(meta, name=names.get(meta.name, meta.name))), boxes=boxes)


def _reshaped(layout: WeightLayout, size: int) -> WeightLayout:
    return _changed(
        layout, lambda meta: replace(meta, shape=(*meta.shape[:-1], size)) if meta.name == "norm.weight" else meta
    )


def _beyond(layout: WeightLayout) -> WeightLayout:
    """Wants one row more of a matrix than it has."""
    name = "embed.weight"
    boxes = tuple((n, Box(b.offset, (b.size[0] + 1, *b.size[1:])) if n == name else b) for n, b in layout.boxes)
    return replace(layout, boxes=boxes)


def _turned(layout: WeightLayout) -> WeightLayout:
    """A transposed matrix."""
    name = "layers.0.down.weight"
    turned = _changed(layout, lambda meta: replace(meta, shape=meta.shape[::-1]) if meta.name == name else meta)
    boxes = tuple((n, Box(b.offset[::-1], b.size[::-1]) if n == name else b) for n, b in layout.boxes)
    return replace(turned, boxes=boxes)


def _as_column(layout: WeightLayout) -> WeightLayout:
    """A vector with a second dimension of length 1."""
    name = "norm.weight"
    column = _changed(layout, lambda meta: replace(meta, shape=(*meta.shape, 1)) if meta.name == name else meta)
    boxes = tuple((n, Box((*b.offset, 0), (*b.size, 1)) if n == name else b) for n, b in layout.boxes)
    return replace(column, boxes=boxes)


def _without_box(layout: WeightLayout, name: str, rank: int) -> WeightLayout:
    """The layout without one rank's box of a tensor."""
    drop = next(((n, box) for n, box in layout.boxes if n == name), None) if layout.rank == rank else None
    return replace(layout, boxes=tuple(entry for entry in layout.boxes if entry != drop))


def _without(layout: WeightLayout, name: str) -> WeightLayout:
    return replace(
        layout,
        tensors=tuple(meta for meta in layout.tensors if meta.name != name),
        boxes=tuple((n, box) for n, box in layout.boxes if n != name),
    )
