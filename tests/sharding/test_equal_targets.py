"""Targets that want the same boxes are planned once: the plan is the one that has every piece of every target."""

from __future__ import annotations

from dataclasses import replace

from every_piece import plan_every_piece
from hypothesis import given, settings
from hypothesis import strategies as st
from sharding_cases import dim0_sharded, metas_of, split_box
from test_plan_properties import Case, cases, plan

from rlsdk.interfaces import Box
from rlsdk.sharding import TRANSPORTS
from rlsdk.sharding.plan.packed_plan import bytes_by_route, sources_of, transports_of
from rlsdk.testing.sharding.tensor_engines import tensor_layout


def check_equal(case: Case) -> None:
    source, target, bucket_bytes = case
    made = plan(case)
    expected = plan_every_piece(source, target, bucket_bytes, TRANSPORTS)
    assert len(made.parts) == len(expected.parts)
    routes: dict[tuple[int, int, str], int] = {}
    for mine, theirs in zip(made.parts, expected.parts, strict=True):
        assert tuple(mine) == tuple(theirs)  # sources, boxes, rounds, transports, readers
        assert sources_of(mine) == {bucket.source for bucket in theirs}
        for bucket in theirs:
            route = bucket.source, bucket.target, bucket.transport
            routes[route] = routes.get(route, 0) + bucket.num_bytes
    assert bytes_by_route(made) == routes
    assert made.num_bytes == sum(routes.values())
    assert set(transports_of(made)) == {way for _, _, way in routes}
    assert made.source_load == expected.load
    direct: dict[int, int] = dict.fromkeys(range(len(source)), 0)
    for (giver, taker, _), num_bytes in routes.items():
        if taker not in made.relays and source[giver].process != target[taker].process:
            direct[giver] += num_bytes
    assert made.relayed_load == direct


@settings(max_examples=40, deadline=None)
@given(cases())
def test_grids_of_ranks(case: Case) -> None:
    check_equal(case)


@st.composite
def placed(draw: st.DrawFn) -> Case:
    """A few distinct targets, each several times, anywhere: beside sources, on their nodes, as workers, elsewhere."""
    shapes = {
        f"t{i}": draw(st.lists(st.integers(1, 9), min_size=1, max_size=2).map(tuple))
        for i in range(draw(st.integers(1, 3)))
    }
    parts, copies = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    nodes, devices = draw(st.integers(1, 3)), draw(st.sampled_from(["cpu", "cuda"]))
    kind = "cpu" if devices == "cpu" else "cuda:{}"
    source = [
        replace(
            layout, node=f"n{rank % nodes}", device=kind.format(rank), process=f"p{rank // draw(st.integers(1, 2))}"
        )
        for rank, layout in enumerate(dim0_sharded(shapes, parts, replicas=copies))
    ]
    lists = [
        [(name, box) for name, shape in shapes.items() for box in split_box(shape, 0, [draw(st.integers(0, shape[0]))])]
        for _ in range(draw(st.integers(1, 2)))
    ]
    target = []
    for rank in range(draw(st.integers(1, 6))):
        boxes = draw(st.sampled_from(lists))
        if draw(st.booleans()):
            boxes = [(name, Box(tuple(box.offset), tuple(box.size))) for name, box in boxes]  # equal, another object
        at = draw(st.integers(0, len(source) - 1))
        layout = tensor_layout(
            metas_of(shapes),
            boxes,
            rank=rank,
            node=draw(st.sampled_from([source[at].node, "n1", "far", "away"])),
            device=draw(st.sampled_from([source[at].device, kind.format(rank)])),
            process=draw(st.sampled_from([source[at].process, f"q{rank}", f"q{rank}", f"q{rank // 2}"])),
        )
        if draw(st.integers(0, 3)) == 0:
            layout = replace(
                layout, worker=f"w{rank % 2}", host=draw(st.sampled_from([source[at].process, "q0", None]))
            )
        target.append(layout)
    return source, target, draw(st.integers(8, 300))


@settings(max_examples=80, deadline=None)
@given(placed())
def test_targets_anywhere(case: Case) -> None:
    check_equal(case)
