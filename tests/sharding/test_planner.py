"""The planner: every byte once, from the nearest holder, evenly, within the bound."""

import pickle
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sharding_cases import dim0_sharded, metas_of, shapes, sources, targets, whole_target

from rlsdk.interfaces import DTYPE_BYTES, Box, ConfigError, LayoutError, ReshardPlan, TensorMeta, WeightLayout
from rlsdk.sharding import TRANSPORTS, lower_bound_bytes, plan_reshard
from rlsdk.testing.sharding.tensor_engines import tensor_layout

BUCKET = 1 << 20


def plan(source: Sequence[WeightLayout], target: Sequence[WeightLayout], bucket_bytes: int = BUCKET) -> ReshardPlan:
    return plan_reshard(source, target, bucket_bytes=bucket_bytes, transports=TRANSPORTS)


@st.composite
def reshards(draw: st.DrawFn) -> tuple[list[WeightLayout], list[WeightLayout], int]:
    tensors = draw(shapes())
    return draw(sources(tensors)), draw(targets(tensors)), draw(st.integers(8, 300))


@settings(max_examples=300, deadline=None)
@given(reshards())
def test_every_wanted_element_comes_exactly_once_from_a_source_that_holds_it(
    case: tuple[list[WeightLayout], list[WeightLayout], int],
) -> None:
    source, target, bucket_bytes = case
    made = plan(source, target, bucket_bytes)
    for index, layout in enumerate(target):
        for meta in layout.tensors:
            whole = Box.whole(meta.shape)
            wanted, came = np.zeros(meta.shape, int), np.zeros(meta.shape, int)
            for name, box in layout.boxes:
                if name == meta.name:
                    wanted[box.slices(whole)] += 1
            for bucket in made.buckets:
                for transfer in bucket.transfers:
                    if bucket.target == index and transfer.name == meta.name:
                        came[transfer.box.slices(whole)] += 1
                        held = [box for name, box in source[bucket.source].boxes if name == meta.name]
                        assert any(box.intersect(transfer.box) == transfer.box for box in held)
            assert np.array_equal(came, wanted)


@settings(max_examples=300, deadline=None)
@given(reshards())
def test_what_crosses_processes_is_the_lower_bound_and_the_counts_add_up(
    case: tuple[list[WeightLayout], list[WeightLayout], int],
) -> None:
    source, target, bucket_bytes = case
    made = plan(source, target, bucket_bytes)
    wire = {name: DTYPE_BYTES[meta.dtype] for name, meta in made.tensors.items()}
    crossing = [b for b in made.buckets if source[b.source].process != target[b.target].process]
    assert made.moved_bytes == sum(b.num_bytes for b in crossing) == made.lower_bound_bytes
    assert made.num_bytes == sum(box.numel * wire[name] for layout in target for name, box in layout.boxes)
    assert sum(made.source_load.values()) == made.moved_bytes
    for bucket in made.buckets:
        sizes = [t.box.numel * DTYPE_BYTES[t.dtype] for t in bucket.transfers]
        assert sizes == [t.num_bytes for t in bucket.transfers]
        assert bucket.num_bytes == sum(sizes)


@settings(max_examples=200, deadline=None)
@given(reshards())
def test_rounds_are_bounded_and_bring_all_of_one_name_together(
    case: tuple[list[WeightLayout], list[WeightLayout], int],
) -> None:
    source, target, bucket_bytes = case
    made = plan(source, target, bucket_bytes)
    assert [(b.target, b.round, b.source) for b in made.buckets] == sorted(
        (b.target, b.round, b.source) for b in made.buckets
    )
    for index, layout in enumerate(target):
        order = {name: at for at, name in enumerate(dict.fromkeys(name for name, _ in layout.boxes))}
        names: list[str] = []
        for _, together in groupby((b for b in made.buckets if b.target == index), key=lambda b: b.round):
            buckets = list(together)
            assert sum(b.num_bytes for b in buckets) <= bucket_bytes
            names += sorted((t.name for b in buckets for t in b.transfers), key=order.__getitem__)
        assert names == sorted(names, key=order.__getitem__)


@settings(max_examples=100, deadline=None)
@given(reshards())
def test_the_same_layouts_give_the_same_plan_and_it_survives_pickling(
    case: tuple[list[WeightLayout], list[WeightLayout], int],
) -> None:
    source, target, bucket_bytes = case
    made = plan(source, target, bucket_bytes)
    assert plan(source, target, bucket_bytes) == made
    assert pickle.loads(pickle.dumps(made)) == made


@settings(max_examples=100, deadline=None)
@given(reshards())
def test_no_source_is_used_while_a_nearer_one_holds_the_same_bytes(
    case: tuple[list[WeightLayout], list[WeightLayout], int],
) -> None:
    def distance(a: WeightLayout, b: WeightLayout) -> int:
        return 0 if a.process == b.process else 1 if a.node == b.node else 2

    source, target, bucket_bytes = case
    for bucket in plan(source, target, bucket_bytes).buckets:
        for transfer in bucket.transfers:
            used = distance(source[bucket.source], target[bucket.target])
            for other in source:
                overlap = any(n == transfer.name and b.intersect(transfer.box) for n, b in other.boxes)
                assert not overlap or distance(other, target[bucket.target]) >= used


@given(st.integers(2, 8), st.integers(1, 4), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_replicas_of_the_source_share_the_work(replicas: int, num_targets: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tensors = {f"t{i}": (int(rng.integers(1, 4000)), 1024) for i in range(12)}
    source = dim0_sharded(tensors, 1, replicas=replicas)
    made = plan(source, [whole_target(tensors, rank) for rank in range(num_targets)], 1 << 30)
    largest = max(t.num_bytes for b in made.buckets for t in b.transfers)
    load = made.source_load.values()
    assert max(load) - min(load) <= largest <= 4 << 20


def test_hybrid_shards_send_from_both_replicas_evenly() -> None:
    tensors = {f"t{i}": (2048, 512) for i in range(8)}
    made = plan(dim0_sharded(tensors, 2, replicas=2), [whole_target(tensors)])
    assert len(set(made.source_load.values())) == 1


def test_a_narrower_target_dtype_travels_and_a_wider_one_does_not() -> None:
    tensors = {"w": (8, 8)}
    narrow = plan(dim0_sharded(tensors, 2), [whole_target(tensors, dtype="bfloat16")])
    wide = plan(dim0_sharded(tensors, 2, "bfloat16"), [whole_target(tensors)])
    assert (narrow.tensors["w"].dtype, narrow.num_bytes) == ("bfloat16", 128)
    assert (wide.tensors["w"].dtype, wide.num_bytes) == ("bfloat16", 128)


def test_a_tied_name_is_taken_from_the_name_that_holds_it() -> None:
    tensors = {"embed": (6, 4)}
    source = [replace(layout, tied={"head": "embed"}) for layout in dim0_sharded(tensors, 2)]
    made = plan(source, [whole_target({"embed": (6, 4), "head": (6, 4)})])
    assert made.num_bytes == 2 * 6 * 4 * 4
    assert {t.name for b in made.buckets for t in b.transfers} == {"embed", "head"}
    only_head = plan(source, [whole_target({"head": (6, 4)})])
    assert only_head.num_bytes == 6 * 4 * 4


def test_the_transport_follows_from_where_the_ends_stand() -> None:
    tensors = {"w": (9, 2)}
    metas = metas_of(tensors)
    boxes = [("w", Box((3 * i, 0), (3, 2))) for i in range(3)]
    source = [
        tensor_layout(metas, boxes[:1], rank=0, node="a", process="a:1"),
        tensor_layout(metas, boxes[1:2], rank=1, node="a", process="a:2"),
        tensor_layout(metas, boxes[2:], rank=2, node="b", process="b:1"),
    ]
    made = plan(source, [replace(whole_target(tensors, node="a"), process="a:1")])
    assert [b.transport for b in made.buckets] == ["in_process", "ring", "object_store"]
    assert made.moved_bytes == lower_bound_bytes(source, [replace(whole_target(tensors), process="a:1")]) == 2 * 6 * 4


@pytest.mark.parametrize(
    ("source_shapes", "target_shapes", "message"),
    [
        ({"model.norm": (4,)}, {"model.norn": (4,)}, r"asks for 'model.norn'.*did you mean 'model.norm'\?"),
        ({"w": (4,)}, {"w": (5,)}, r"'w': the source holds shape \[4\], the target wants \[5\]"),
        ({"w": (4,), "bias": (2,)}, {"w": (4,)}, "the source trains 'bias', which no target asks for"),
    ],
)
def test_layouts_that_do_not_match_are_refused_by_name(
    source_shapes: dict[str, tuple[int, ...]], target_shapes: dict[str, tuple[int, ...]], message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        plan(dim0_sharded(source_shapes, 1), [whole_target(target_shapes)])


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_a_cast_to_float8_without_scales_is_refused(dtype: str) -> None:
    tensors = {"w": (4, 2)}
    with pytest.raises(LayoutError, match=rf"'w': the source holds float32, the target wants {dtype}.*without scales"):
        plan(dim0_sharded(tensors, 1), [whole_target(tensors, dtype=dtype)])


def test_a_part_that_nobody_holds_is_refused_with_its_place() -> None:
    source = dim0_sharded({"w": (6, 2)}, 3)
    with pytest.raises(
        LayoutError, match=r"'w': the part at offset \[2, 0\] of size \[2, 2\] is wanted, but no source"
    ):
        plan([source[0], source[2]], [whole_target({"w": (6, 2)})])


def test_sources_that_disagree_are_refused() -> None:
    source = dim0_sharded({"w": (4,)}, 2)
    odd = replace(source[1], tensors=(TensorMeta(name="w", shape=(4,), dtype="bfloat16"),))
    with pytest.raises(
        LayoutError, match=r"source ranks disagree on 'w': \[4\] float32 on one, \[4\] bfloat16 on rank 1"
    ):
        plan([source[0], odd], [whole_target({"w": (4,)})])


def test_a_head_trained_apart_from_the_embedding_it_is_served_tied_to_is_refused() -> None:
    tensors = {"embed": (4, 2), "head": (4, 2)}
    tied = replace(whole_target({"embed": (4, 2)}), tied={"head": "embed"})
    with pytest.raises(LayoutError, match="trains 'head' by itself, but the target serves it tied to 'embed'"):
        plan(dim0_sharded(tensors, 1), [tied])


def test_a_cast_between_floats_and_integers_is_refused() -> None:
    with pytest.raises(LayoutError, match="'w': the source holds float32, the target wants int8"):
        plan(dim0_sharded({"w": (4,)}, 1), [whole_target({"w": (4,)}, dtype="int8")])


def test_a_bucket_too_small_for_one_element_is_refused() -> None:
    with pytest.raises(ConfigError, match="bucket_bytes is 4: expected at least 8"):
        plan(dim0_sharded({"w": (4,)}, 1), [whole_target({"w": (4,)})], 4)
