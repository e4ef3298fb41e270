"""Presets, pools, and whether a cluster has what is asked for."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsdk.cluster import PRESETS, PlacementSpec, PoolSpec, preset_placement
from rlsdk.cluster.devices.capacity import NodeCapacity, assign_nodes
from rlsdk.interfaces import ConfigError, PlacementError

ROLES = ("actor", "rollout", "ref", "critic", "reward")


def node(name: str, gpus: float = 0, cpus: float = 64) -> NodeCapacity:
    return NodeCapacity(node_id=name, address=name, cpus=cpus, gpus=gpus, total_cpus=64, total_gpus=8)


def pool(name: str, *devices: int, device: str = "cuda") -> PoolSpec:
    return PoolSpec(name=name, devices_per_node=devices, device=device)


def test_colocate_all_puts_every_role_on_every_device() -> None:
    spec = preset_placement("colocate_all", ROLES, num_nodes=2, devices_per_node=8, device="cuda", cpus_per_device=4)
    assert spec.pools == (
        PoolSpec(name="actor+rollout+ref+critic+reward", devices_per_node=(8, 8), device="cuda", cpus_per_device=4),
    )
    assert all(spec.pool_of(role) is spec.pools[0] for role in ROLES)


def test_named_pairs_share_a_pool_and_the_rest_stands_alone() -> None:
    spec = preset_placement("colocate_actor_ref", ROLES, devices_per_node=8)
    assert [(p.name, p.devices_per_node) for p in spec.pools] == [
        ("actor+ref", (2,)), ("rollout", (2,)), ("critic", (2,)), ("reward", (2,)),
    ]  # fmt: skip
    spec = preset_placement("colocate_critic_reward", ROLES, devices_per_node=8, devices={"rollout": 4, "reward": 2})
    assert [(p.name, p.devices_per_node) for p in spec.pools] == [
        ("actor", (1,)), ("rollout", (4,)), ("ref", (1,)), ("critic+reward", (2,)),
    ]  # fmt: skip


def test_disaggregated_pools_may_begin_and_end_within_a_node() -> None:
    spec = preset_placement("disaggregated", ("actor", "rollout"), num_nodes=3, devices_per_node=4)
    assert [p.devices_per_node for p in spec.pools] == [(4, 2), (2, 4)]
    assert spec.pools[0].node_of_device == (0, 0, 0, 0, 1, 1)


@given(st.sampled_from(PRESETS), st.integers(1, 6), st.integers(1, 9), st.integers(1, 5))
def test_presets_deal_out_every_device_once(preset: str, nodes: int, per_node: int, num_roles: int) -> None:
    roles = ROLES[:num_roles]
    try:
        spec = preset_placement(preset, roles, num_nodes=nodes, devices_per_node=per_node)
    except ConfigError:
        assert nodes * per_node < num_roles
        return
    counts = [p.num_devices for p in spec.pools]
    assert sum(counts) == nodes * per_node
    assert max(counts) - min(counts) <= 1
    assert set(spec.roles) == set(roles)
    assign_nodes(spec, [node(f"n{at}", cpus=per_node) for at in range(nodes)])


def test_too_few_devices_for_the_pools_show_the_arithmetic() -> None:
    with pytest.raises(
        ConfigError, match=r"3 pools \['actor', 'rollout', 'ref'\].* 2 devices less 0 given leave 2 for 3"
    ):
        preset_placement("disaggregated", ROLES[:3], devices_per_node=2)
    with pytest.raises(ConfigError, match="2 devices less 5 given leave -3"):
        preset_placement("disaggregated", ROLES[:2], devices_per_node=2, devices={"actor": 3, "rollout": 2})


def test_names_that_do_not_exist_answer_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'colocate_all'"):
        preset_placement("collocate_all", ROLES)
    with pytest.raises(ConfigError, match=r"pool 'trian'; did you mean 'train'"):
        PlacementSpec(pools=(pool("train", 1),), roles={"actor": "trian"})
    with pytest.raises(ConfigError, match="device 'gpu' is not one of"):
        pool("train", 1, device="gpu")
    with pytest.raises(ConfigError, match="positive number per node"):
        pool("train", 2, 0)


def test_the_search_goes_back_where_the_best_fit_leads_nowhere() -> None:
    placement = PlacementSpec(pools=(pool("a", 3), pool("b", 2, 1)), roles={})
    found = assign_nodes(placement, [node("x", gpus=4), node("y", gpus=3)])
    assert found == {"a": ("x",), "b": ("y", "x")}


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_one_pool_fits_exactly_when_its_sorted_entries_do(devices: list[int], gpus: list[int]) -> None:
    placement = PlacementSpec(pools=(pool("a", *devices),), roles={})
    nodes = [node(f"n{at}", gpus=count) for at, count in enumerate(gpus)]
    best = sorted(gpus, reverse=True)
    fits = len(devices) <= len(gpus) and all(d <= g for d, g in zip(sorted(devices, reverse=True), best, strict=False))
    try:
        chosen = assign_nodes(placement, nodes)["a"]
    except PlacementError:
        assert not fits
    else:
        assert fits
        assert len(set(chosen)) == len(devices)
        assert all(gpus[int(name[1:])] >= count for name, count in zip(chosen, devices, strict=True))


def test_a_refusal_shows_asked_against_available_node_by_node() -> None:
    placement = PlacementSpec(
        pools=(pool("train", 8, 8), pool("serve", 4)), roles={"actor": "train", "ref": "train", "rollout": "serve"}
    )
    with pytest.raises(PlacementError) as caught:
        assign_nodes(placement, [node("10.0.0.1", gpus=8), node("10.0.0.2", gpus=6, cpus=12)])
    assert str(caught.value).splitlines() == [
        "the placement asks for 20 GPUs and 20 CPUs, the cluster has 14 GPUs and 76 CPUs free on 2 nodes: each pool "
        "fits alone, but not all of them together",
        "asked:",
        "  pool   roles       devices by node  each device",
        "  train  actor, ref  8 + 8            1 GPU, 1 CPU",
        "  serve  rollout     4                1 GPU, 1 CPU",
        "available:",
        "  node      GPUs free  CPUs free",
        "  10.0.0.1  8 of 8     64 of 64",
        "  10.0.0.2  6 of 8     12 of 64",
        "Ask for fewer devices (placement.devices_per_node, placement.num_nodes, placement.cpus_per_device), let roles "
        "share a pool, or add nodes to the cluster.",
    ]


def test_gpus_that_no_node_has_name_the_way_without() -> None:
    placement = PlacementSpec(pools=(pool("a", 1),), roles={"actor": "a", "rollout": "a"})
    with pytest.raises(PlacementError, match="There is no GPU here: `--placement"):
        assign_nodes(placement, [replace(node("10.0.0.1", gpus=0), total_gpus=0.0)])


@pytest.mark.parametrize(
    ("devices", "gpus", "why"),
    [
        ((9,), (8, 8), "no node has 9 GPUs and 9 CPUs free for the 9 devices of pool 'a'"),
        ((2, 2, 2), (8, 8), "pool 'a' wants 3 different nodes"),
        ((1,), (), "on 0 nodes"),
    ],
)
def test_a_refusal_says_what_does_not_fit(devices: tuple[int, ...], gpus: tuple[int, ...], why: str) -> None:
    with pytest.raises(PlacementError, match=re.escape(why)):
        assign_nodes(PlacementSpec(pools=(pool("a", *devices),), roles={}), [node(str(g), gpus=g) for g in gpus])


FIVE = ["actor", "rollout", "ref", "critic", "reward.a", "reward.b"]


@pytest.mark.parametrize(
    ("preset", "devices", "given", "expected"),
    [
        ("colocate_all", 2, {}, {"actor+rollout+ref+critic+reward.a+reward.b": 2}),
        (
            "colocate_actor_ref",
            7,
            {"critic": 2},
            {"actor+ref": 2, "rollout": 1, "critic": 2, "reward.a": 1, "reward.b": 1},
        ),
        (
            "colocate_critic_reward",
            5,
            {"reward": 2},
            {"actor": 1, "rollout": 1, "ref": 1, "critic+reward.a+reward.b": 2},
        ),
        (
            "disaggregated",
            8,
            {"reward": 2, "reward.b": 1},
            {"actor": 2, "rollout": 1, "ref": 1, "critic": 1, "reward.a": 2, "reward.b": 1},
        ),
    ],
)
def test_every_preset_places_five_roles_and_several_reward_models(
    preset: str, devices: int, given: dict[str, int], expected: dict[str, int]
) -> None:
    placement = preset_placement(preset, FIVE, devices_per_node=devices, devices=given)
    assert {pool.name: pool.num_devices for pool in placement.pools} == expected
    assert {role for pool in expected for role in pool.split("+")} == set(placement.roles)
