"""Plans are made once for each pair of layouts."""

import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sharding_cases import dim0_sharded, random_tensors, rollout_group, shapes, sources, train_group, whole_target

from rlsdk.interfaces import Box, WeightLayout
from rlsdk.sharding import TRANSPORTS, GenericShardingManager, PlanCache, layout_hash

SHAPES = {"embed": (40, 8), "norm": (8,)}


def test_a_layout_that_has_not_changed_is_never_planned_again() -> None:
    cache = PlanCache(bucket_bytes=1 << 20, transports=TRANSPORTS)
    source, target = dim0_sharded(SHAPES, 2), [whole_target(SHAPES)]
    first = cache.plan(source, target)
    copies = pickle.loads(pickle.dumps((source, target)))
    assert cache.plan(*copies) is first
    assert cache.num_planned == 1
    restarted = [replace(target[0], process="rollout:again")]
    assert cache.plan(source, restarted) is not first
    assert cache.plan(source, target) is first
    assert cache.num_planned == 2


def test_the_least_recently_used_plan_goes_first() -> None:
    cache = PlanCache(bucket_bytes=1 << 20, transports=TRANSPORTS)
    source = dim0_sharded(SHAPES, 1)
    replicas = [[whole_target(SHAPES, rank)] for rank in range(5)]
    for target in (*replicas[:4], replicas[0], replicas[4]):
        cache.plan(source, target)
    assert cache.num_planned == 5
    cache.plan(source, replicas[0])
    assert cache.num_planned == 5
    cache.plan(source, replicas[1])
    assert cache.num_planned == 6


def test_syncs_of_one_manager_plan_once() -> None:
    train = train_group(random_tensors(SHAPES), dim0_sharded(SHAPES, 2))
    manager = GenericShardingManager(train, rollout_group([[whole_target(SHAPES)]]))
    for version in range(4):
        manager.sync(version)
        train.run("optim_step")
    assert manager.plans.num_planned == 1


CHANGES: dict[str, Callable[[WeightLayout], WeightLayout]] = {
    "rank": lambda layout: replace(layout, rank=7),
    "node": lambda layout: replace(layout, node="other"),
    "device": lambda layout: replace(layout, device="cuda:1"),
    "process": lambda layout: replace(layout, process="other"),
    "worker": lambda layout: replace(layout, worker="other"),
    "host": lambda layout: replace(layout, host="other"),
    "is_apart": lambda layout: replace(layout, is_apart=True),
    "tied": lambda layout: replace(layout, tied={"head": "embed"}),
    "dtype": lambda layout: replace(layout, tensors=tuple(replace(m, dtype="bfloat16") for m in layout.tensors)),
    "box": lambda layout: replace(layout, boxes=(("embed", Box((0, 0), (40, 7))), *layout.boxes[1:])),
    "order": lambda layout: replace(layout, boxes=layout.boxes[::-1]),
    "fewer": lambda layout: replace(layout, boxes=layout.boxes[:1]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_a_layout_says_is_part_of_its_hash(change: str) -> None:
    layout = whole_target(SHAPES)
    assert layout_hash([layout]) != layout_hash([CHANGES[change](layout)])


@settings(max_examples=50, deadline=None)
@given(st.data(), shapes())
def test_equal_layouts_have_equal_hashes(data: st.DataObject, tensors: dict[str, tuple[int, ...]]) -> None:
    layouts = data.draw(sources(tensors))
    assert layout_hash(pickle.loads(pickle.dumps(layouts))) == layout_hash(tuple(layouts))
