"""Ranks find each other through a port that is never free for anybody else."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch.distributed as dist

from rlsdk.cluster import Cluster
from rlsdk.interfaces import DeadlineError, RankContext
from rlsdk.kit.ranks.rendezvous import destroy_process_group, hold_port, init_process_group, release_port


def test_ranks_add_up_and_a_second_role_shares_their_group(own_cluster: Callable[[int], Cluster]) -> None:
    cluster = own_cluster(2)
    first = cluster.create_group("victim", "cluster_hosts:GlooHost")
    second = cluster.create_group("other", "cluster_hosts:GlooHost")
    assert first.run("total", 1.5) == [4.5, 4.5]
    assert second.run("total", 2.0) == [6.0, 6.0]
    first.run("close")
    assert second.run("total", 1.0) == [3.0, 3.0], "the group lives until the last role leaves"


def test_a_held_port_belongs_to_its_holder_until_it_is_released() -> None:
    port = hold_port("127.0.0.1")
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    release_port(port)
    release_port(port)
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))


def test_a_rank_that_comes_early_waits_in_the_held_socket() -> None:
    port = hold_port("127.0.0.1")
    early = socket.create_connection(("127.0.0.1", port), timeout=1)
    release_port(port)
    early.close()


def test_a_rank_that_waits_in_vain_says_for_whom() -> None:
    ctx = RankContext(role="actor", rank=0, world_size=2, master_port=hold_port("127.0.0.1"), timeout_s=0.5)
    with pytest.raises(DeadlineError, match=r"actor rank 0 of 2 waited 0\.5 s at 127\.0\.0\.1:\d+ for the other ranks"):
        init_process_group(ctx, "gloo")
    destroy_process_group(ctx)


def test_a_single_rank_needs_no_port() -> None:
    ctx = RankContext(role="actor")
    init_process_group(ctx, "gloo")
    try:
        assert dist.get_world_size() == 1
        init_process_group(replace(ctx, role="ref"), "gloo")
        destroy_process_group(ctx)
        assert dist.is_initialized()
    finally:
        destroy_process_group(replace(ctx, role="ref"))
    assert not dist.is_initialized()
    destroy_process_group(ctx)
