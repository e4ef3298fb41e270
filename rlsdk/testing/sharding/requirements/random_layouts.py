"""Requirements: layouts with random tensors, splits, copies, placement and dtypes, from fixed seeds."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rlsdk.interfaces import DTYPE_BYTES, Box, ReshardPlan, TensorMeta, WeightLayout
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
from rlsdk.testing.sharding.layouts import Pair, in_one_process, pairs, random_tensors
from rlsdk.testing.sharding.tensor_engines import tensor_layout
from rlsdk.testing.suites.requirements import Measured, requirement

NUM_PAIRS = 12
NUM_SYNCS = 6
BUCKETS = (64, 100, 999, 1 << 20)
"""Bucket sizes in bytes: a few elements, not a multiple of the element size, and more than the model."""
BOUNDS = tuple(int(64 * 1.3**power) for power in range(30))
"""Bucket sizes in bytes, so that the last round has any amount left."""
FLOATS = ("float32", "bfloat16", "float16")


class RandomLayoutRequirements:
    """Mixed into `ShardingConformance`."""

    @requirement("plan.random", since=(2, 0))
    def test_plan_random(self, lab: ShardingLab, measured: Measured) -> None:
        """For random layouts over processes, devices and nodes, every element is sent once, in order, from the nearest
        source, with the fewest bytes, and as the plan says."""
        for seed in range(NUM_PAIRS):
            pair, _ = random_pair(seed)
            plan = lab.plan(pair)
            measured.none(f"elements not sent once, {seed}", not_once(plan, pair.target))
            measured.none(f"fields that are wrong, {seed}", list(wrong_fields(plan, pair)))
            measured.none(f"out of order, {seed}", list(out_of_order(plan.parts)))
            measured.none(f"sent from afar, {seed}", list(sent_from_afar(plan, pair)))
            measured.none(f"bytes that are wrong, {seed}", wrong_bytes(plan, pair))

    @requirement("plan.buckets", since=(2, 0))
    def test_plan_buckets(self, lab: ShardingLab, measured: Measured) -> None:
        """Buckets and rounds respect any bound, from a few elements to more than the model."""
        for bound in BUCKETS:
            for name in (
                "sharded to tensor parallel",
                "float32 to bfloat16 and float32",
                "four copies to four replicas",
            ):
                pair = pairs()[name]
                manager = lab.trial(pairs()["one rank to one"], bucket_bytes=bound).manager
                plan = manager.plan(tuple(pair.source), tuple(pair.target))
                where = f"{name}, {bound} bytes"
                measured.equal(f"bound, {where}", plan.bucket_bytes, bound)
                measured.none(f"elements not sent once, {where}", not_once(plan, pair.target))
                measured.none(f"out of order, {where}", list(out_of_order(plan.parts)))
                rounds: dict[tuple[int, int], int] = {}
                for bucket in plan.buckets:
                    key = bucket.target, bucket.round
                    rounds[key] = rounds.get(key, 0) + sum(map(transfer_bytes, bucket.transfers))
                measured.at_most(f"largest round, {where}", max(rounds.values()), bound)
                if bound > plan.num_bytes:
                    measured.at_most(f"rounds of a target, {where}", max(r for _, r in rounds) + 1, 1)

    @requirement("plan.rounds", since=(2, 0))
    def test_plan_rounds(self, lab: ShardingLab, measured: Measured) -> None:
        """No round exceeds its bound, not even the last one, which is from nearly empty to full at different bounds."""
        pair, over = pairs()["sharded to whole, two replicas"], []
        for bound in BOUNDS:
            manager = lab.trial(pairs()["one rank to one"], bucket_bytes=bound).manager
            rounds: Counter[tuple[int, int]] = Counter()
            for bucket in manager.plan(tuple(pair.source), tuple(pair.target)).buckets:
                rounds[bucket.target, bucket.round] += sum(map(transfer_bytes, bucket.transfers))
            over += [f"{size} bytes of {bound}" for size in rounds.values() if size > bound]
        measured.none("rounds over their bound", over)

    @requirement("sync.managers", since=(2, 0))
    def test_managers(self, lab: ShardingLab, measured: Measured) -> None:
        """Two managers with equal numbers of ranks and replicas, but other tensors, each transfer their own in turn."""
        for name, pair in pairs().items():
            one, other = lab.trial(pair), lab.trial(*renamed(pair))
            for version in (1, 2):
                for trial in (one, other):
                    trial.step()
                    trial.sync(version, expect_change=True)
                    measured.none(f"boxes that differ, {name}", trial.differing())

    @requirement("plan.preference", since=(2, 0))
    def test_plan_preference(self, lab: ShardingLab, measured: Measured) -> None:
        """The first allowed transport that reaches the target is used, in the order of `transports`; the report names
        the used ones."""
        pair = pairs()["sharded to whole, two replicas"]
        orders: tuple[tuple[str, ...], ...] = (("object_store", "ring"), ("ring", "object_store"))
        for order in orders:
            trial = lab.trial(pair, transports=order)
            used = {bucket.transport for bucket in trial.plan().buckets}
            measured.equal(f"transports other than the first of {order}", used != {order[0]}, 0)
            report = trial.sync(1)
            measured.equal(f"transports that the report names, of {order}", tuple(report.transports) != order[:1], 0)
            measured.none(f"boxes that differ, {order}", trial.differing())
        near = lab.trial(in_one_process(), transports=("object_store", "in_process"))
        used = {bucket.transport for bucket in near.plan().buckets}
        measured.equal("transports other than the first, in one process", used != {"object_store"}, 0)

    @requirement("sync.random", since=(2, 0))
    def test_sync_random(self, lab: ShardingLab, measured: Measured) -> None:
        """Weights of random layouts arrive bit for bit, even in small buckets, and again after a step."""
        for seed in range(100, 100 + NUM_SYNCS):
            pair, tensors = random_pair(seed, here=True)
            bound = (1 << 16, 200)[seed % 2]
            trial = lab.trial(pair, tensors, bucket_bytes=bound)
            trial.sync(1)
            measured.none(f"boxes that differ, {seed}", trial.differing())
            trial.step()
            report = trial.sync(2, expect_change=True)
            measured.none(f"boxes that differ after a step, {seed}", trial.differing())
            measured.equal(f"tensors that changed, {seed}", report.changed_tensors, len(tensors))


def renamed(pair: Pair) -> tuple[Pair, dict[str, Tensor]]:
    """The same ranks with renamed tensors, and their values."""

    def other(layout: WeightLayout) -> WeightLayout:
        return replace(
            layout,
            tensors=tuple(replace(meta, name=f"other.{meta.name}") for meta in layout.tensors),
            boxes=tuple((f"other.{name}", box) for name, box in layout.boxes),
            tied={f"other.{name}": f"other.{held}" for name, held in layout.tied.items()},
        )

    tensors = {f"other.{name}": tensor + 1 for name, tensor in random_tensors().items()}
    replicas = [[other(layout) for layout in layouts] for layouts in pair.replicas]
    return Pair(source=[other(layout) for layout in pair.source], replicas=replicas), tensors


def wrong_bytes(plan: ReshardPlan, pair: Pair) -> list[str]:
    """Sums of a plan that differ from those of its buckets, or exceed the necessary bytes."""
    wire = wire_dtypes(pair.source, pair.target)
    wanted = sum(box.numel * DTYPE_BYTES[wire[name]] for _, name, box in wanted_boxes(pair))
    away = sum(bucket.num_bytes for bucket in plan.buckets if distance(pair, bucket.source, bucket.target) != HERE)
    lacking = lacking_bytes(pair, wire)
    found = {"num_bytes": (plan.num_bytes, wanted), "moved_bytes": (plan.moved_bytes, away),
             "what is moved": (away, lacking), "lower_bound_bytes": (plan.lower_bound_bytes, lacking)}  # fmt: skip
    return [f"{name} {is_so}, expected {expected}" for name, (is_so, expected) in found.items() if is_so != expected]


def random_pair(seed: int, *, here: bool = False) -> tuple[Pair, dict[str, Tensor]]:
    """Layouts of random tensors, and their values.

    Args:
        seed: seed of all random choices.
        here: everything is on one node, so that weights can be transferred.
    """
    draw = random.Random(seed)
    held, served = draw.choice(FLOATS), draw.choice(FLOATS)
    metas = [
        TensorMeta(
            name=f"layers.{at}.weight", shape=tuple(draw.randint(1, 9) for _ in range(draw.randint(0, 4))), dtype=held
        )
        for at in range(draw.randint(1, 7))
    ]
    copies, parts = draw.randint(1, 3), draw.randint(1, 4)
    nodes = ("a",) if here else ("a", "b")
    owned = [
        {meta.name: pieces for meta in metas for pieces in (_dealt(draw, meta.shape, parts),)} for _ in range(copies)
    ]
    source = [
        _placed(
            draw, metas, [(n, b) for n, dealt in owned[rank // parts].items() for b in dealt[rank % parts]], rank, nodes
        )
        for rank in range(copies * parts)
    ]
    wanted = [replace(meta, dtype=served) for meta in metas]
    replicas = []
    for replica in range(draw.randint(1, 3)):
        places = draw.randint(1, 2)
        dealt = {meta.name: _dealt(draw, meta.shape, places, shared=True) for meta in metas}
        boxes = [[(name, box) for name, parts_of in dealt.items() for box in parts_of[at]] for at in range(places)]
        replicas.append([_placed(draw, wanted, boxes[at], at, nodes, f"r{replica}") for at in range(places)])
    generator = torch.Generator().manual_seed(seed)
    tensors = {meta.name: torch.randn(meta.shape, generator=generator) for meta in metas}
    return Pair(source=source, replicas=replicas), tensors


def _placed(
    draw: random.Random,
    metas: Sequence[TensorMeta],
    boxes: Sequence[tuple[str, Box]],
    rank: int,
    nodes: Sequence[str],
    kind: str = "",
) -> WeightLayout:
    """Places a rank at random: some sources and targets share processes and devices. Omits tensors without a box."""
    boxed = {name for name, _ in boxes}
    node = draw.choice(nodes)
    known = [meta for meta in metas if meta.name in boxed]
    process = f"{node}:{draw.randint(1, 3)}" if draw.random() < 0.4 else f"{node}:{kind}{rank + 10}"
    return replace(tensor_layout(known, list(boxes), rank=rank, process=process), node=node)


def _dealt(draw: random.Random, shape: tuple[int, ...], parts: int, *, shared: bool = False) -> list[list[Box]]:
    """A tensor split into boxes that are distributed at random: the boxes of each part. Shared: some parts have all."""
    boxes = list(_cut(draw, Box.whole(shape), draw.randint(0, 4)))
    if shared and draw.random() < 0.4:
        return [[Box.whole(shape)] for _ in range(parts)]
    dealt: list[list[Box]] = [[] for _ in range(parts)]
    for box in boxes:
        dealt[draw.randrange(parts)].append(box)
    return dealt


def _cut(draw: random.Random, box: Box, times: int) -> Iterator[Box]:
    """Boxes that tile a box, from at most `times` splits."""
    axes = [axis for axis, size in enumerate(box.size) if size > 1]
    if not times or not axes:
        yield box
        return
    axis = draw.choice(axes)
    at = draw.randint(1, box.size[axis] - 1)
    low, high, offset = list(box.size), list(box.size), list(box.offset)
    low[axis], high[axis], offset[axis] = at, box.size[axis] - at, box.offset[axis] + at
    yield from _cut(draw, Box(box.offset, tuple(low)), times // 2)
    yield from _cut(draw, Box(tuple(offset), tuple(high)), times - 1 - times // 2)
