"""What every plan promises, over layouts as engines make them: up to 64 ranks, parallel in several ways at once.

Sources and targets are grids of ranks (replicas x parts). Each tensor is cut along a dimension of its own, evenly with
a short or empty end (padding), at random places (uneven), in interleaved stripes (fused and grouped storage), or not
at all; sizes of the two sides have nothing to do with each other.
"""

import pickle
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from sharding_cases import metas_of, split_box

from rlsdk.interfaces import DTYPE_BYTES, Box, ReshardPlan, WeightLayout
from rlsdk.sharding import TRANSPORTS, plan_reshard
from rlsdk.sharding.plan.boxes import covered_elements
from rlsdk.testing.sharding.tensor_engines import tensor_layout

Shapes = Mapping[str, tuple[int, ...]]
Case = tuple[list[WeightLayout], list[WeightLayout], int]


@st.composite
def grids(draw: st.DrawFn, tensors: Shapes, dtype: str, side: str, most: int) -> list[WeightLayout]:
    """Up to `most` ranks: parts of every tensor, each part on several ranks."""
    parts = draw(st.integers(1, most))
    replicas = draw(st.integers(1, max(1, most // parts)))
    cuts = {name: _cuts(draw, shape, parts) for name, shape in tensors.items()}
    same_process, same_node = draw(st.booleans()), draw(st.integers(1, 8))
    return [
        tensor_layout(
            metas_of(tensors, dtype),
            [(name, box) for name, mine in cuts.items() for box in mine[rank % parts]],
            rank=rank,
            node=f"{'any' if same_process else side}-{rank // same_node}",
            process=f"{'any' if same_process else side}:{rank}",
        )
        for rank in range(parts * replicas)
    ]


def _cuts(draw: st.DrawFn, shape: tuple[int, ...], parts: int) -> list[list[Box]]:
    """For each part its boxes of one tensor; together they tile it."""
    kind = draw(st.sampled_from(["even", "uneven", "striped", "whole"])) if shape else "whole"
    if kind == "whole":
        return [[Box.whole(shape)]] * parts
    axis = draw(st.integers(0, len(shape) - 1))
    if kind == "striped":
        stripe = -(-shape[axis] // (2 * parts))
        edges = [min(shape[axis], stripe * i) for i in range(1, 2 * parts)]
        pieces = split_box(shape, axis, edges)
        return [[pieces[part], pieces[part + parts]] for part in range(parts)]
    if kind == "even":
        share = -(-shape[axis] // parts)
        edges = [min(shape[axis], share * i) for i in range(1, parts)]
    else:
        edges = sorted(draw(st.lists(st.integers(0, shape[axis]), min_size=parts - 1, max_size=parts - 1)))
    return [[box] for box in split_box(shape, axis, edges)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dims = st.lists(st.integers(1, 12), min_size=0, max_size=3).map(tuple)
    tensors: Shapes = {f"t{i}": draw(dims) for i in range(draw(st.integers(1, 3)))}
    source = draw(grids(tensors, draw(st.sampled_from(["float32", "bfloat16"])), "train", draw(st.integers(1, 64))))
    dtype = draw(st.sampled_from(["float32", "bfloat16"]))
    if draw(st.booleans()):
        source = [replace(layout, tied={"head": "t0"}) for layout in source]
        tensors = {**tensors, "head": tensors["t0"]}
    return source, draw(grids(tensors, dtype, "rollout", draw(st.integers(1, 16)))), draw(st.integers(8, 2000))


def plan(case: Case) -> ReshardPlan:
    source, target, bucket_bytes = case
    return plan_reshard(source, target, bucket_bytes=bucket_bytes, transports=TRANSPORTS)


@settings(max_examples=150, deadline=None)
@given(cases())
def test_every_wanted_box_is_covered_exactly_and_no_byte_comes_twice(case: Case) -> None:
    source, target, _ = case
    made = plan(case)
    for index, layout in enumerate(target):
        shapes = {meta.name: meta.shape for meta in layout.tensors}
        wanted = {name: np.zeros(shape, int) for name, shape in shapes.items()}
        came = {name: np.zeros(shape, int) for name, shape in shapes.items()}
        for name, box in layout.boxes:
            wanted[name][box.slices(Box.whole(shapes[name]))] = 1
        for bucket in made.parts[index]:
            for transfer in bucket.transfers:
                came[transfer.name][transfer.box.slices(Box.whole(shapes[transfer.name]))] += 1
                held = source[bucket.source].tied.get(transfer.name, transfer.name)
                assert any(
                    n == held and b.intersect(transfer.box) == transfer.box for n, b in source[bucket.source].boxes
                )
        for name in shapes:
            assert np.array_equal(came[name], wanted[name])


@settings(max_examples=150, deadline=None)
@given(cases())
def test_what_moves_is_what_each_target_lacks_in_its_own_process(case: Case) -> None:
    source, target, _ = case
    made = plan(case)
    lacking = 0
    for layout in target:
        home = [rank for rank in source if rank.process == layout.process]
        for name, box in layout.boxes:
            here = [b for rank in home for n, b in rank.boxes if n == rank.tied.get(name, name)]
            lacking += (box.numel - covered_elements(box, here)) * DTYPE_BYTES[made.tensors[name].dtype]
    assert made.moved_bytes == made.lower_bound_bytes == lacking == sum(made.source_load.values())


@settings(max_examples=60, deadline=None)
@given(cases())
def test_the_same_layouts_give_the_same_plan(case: Case) -> None:
    assert plan(case).parts == plan(case).parts


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 8), st.integers(2, 8), st.integers(1, 12), st.integers(0, 10**6), st.sampled_from([4, 10**4, 10**9])
)
def test_replicas_send_within_a_tenth_of_the_same(
    parts: int, replicas: int, num_targets: int, seed: int, bucket_bytes: int
) -> None:
    rng = np.random.default_rng(seed)
    tensors = {f"t{i}": (int(rng.integers(64, 2048)), int(rng.integers(1, 64))) for i in range(6)}
    metas = metas_of(tensors)
    source = [
        tensor_layout(
            metas,
            [
                (n, split_box(s, 0, [s[0] * i // parts for i in range(1, parts)])[rank % parts])
                for n, s in tensors.items()
            ],
            rank=rank,
            process=f"train:{rank}",
        )
        for rank in range(parts * replicas)
    ]
    wants = [
        tensor_layout(metas, [(n, Box.whole(s)) for n, s in tensors.items()], rank=r, process=f"rollout:{r}")
        for r in range(num_targets)
    ]
    load = np.array(list(plan((source, wants, max(bucket_bytes, 8))).source_load.values()), float)
    by_part = load.reshape(replicas, parts)
    assert np.all(np.abs(by_part - by_part.mean(axis=0)) <= 0.1 * by_part.mean(axis=0))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([(2, 2), (2, 4), (4, 4), (4, 8)]), st.integers(1, 4), st.integers(1, 3))
def test_loads_are_even_where_some_tensors_have_more_holders_than_others(
    parallel: tuple[int, int], copies: int, num_targets: int
) -> None:
    """Experts on a few ranks each, dense weights in tensor-parallel parts on many, norms on all: as in a MoE."""
    tp, ep = parallel
    ranks = tp * ep * copies
    shapes = {f"expert.{e}": (256, 32) for e in range(ep * 2)} | {"dense": (512, 64), "norm": (999,)}
    metas = metas_of(shapes)
    source = []
    for rank in range(ranks):
        boxes = [(f"expert.{e}", Box.whole((256, 32))) for e in range(ep * 2) if e // 2 == rank % ep]
        boxes += [("dense", Box((512 // tp * (rank % tp), 0), (512 // tp, 64))), ("norm", Box.whole((999,)))]
        source.append(tensor_layout(metas, boxes, rank=rank, process=f"train:{rank}"))
    wants = [
        tensor_layout(metas, [(n, Box.whole(s)) for n, s in shapes.items()], rank=r, process=f"rollout:{r}")
        for r in range(num_targets)
    ]
    load = np.array(list(plan((source, wants, 10**6)).source_load.values()), float)
    assert load.max() <= 1.1 * load.mean()


def test_a_part_of_a_plan_travels_alone_and_small() -> None:
    tensors: Shapes = {f"layer.{i}.weight": (64, 64) for i in range(50)}
    metas = metas_of(tensors)
    source = [tensor_layout(metas, [(n, Box.whole(s)) for n, s in tensors.items()], process="train:0")]
    wants = [
        tensor_layout(metas, [(n, Box.whole(tensors[n]))], rank=r, process=f"r:{r}") for r, n in enumerate(tensors)
    ]
    made = plan((source, wants, 1 << 20))
    list(made.parts[7])
    again = pickle.loads(pickle.dumps(made.parts[7]))
    assert again == made.parts[7]
    assert [t.name for bucket in again for t in bucket.transfers] == ["layer.7.weight"]
    assert len(pickle.dumps(made.parts[7])) < 2500
