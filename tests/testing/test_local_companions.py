"""Companions on this machine, and what an engine sees of nodes behind its own."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from rlsdk.interfaces import ConfigError, RankContext, RlsdkError, WorkerError
from rlsdk.kit.ranks.companions import get_companions
from rlsdk.kit.ranks.other_nodes import OtherNodes, free_port, node_names, num_here
from rlsdk.testing.process.local_companions import local_companions, look_until_error

CONTEXT = RankContext(role="rollout", node="a", bundles=(3, 4, 5, 6), device_nodes=("a", "a", "b", "c"))
PART = f"{__name__}:Part"


class Part:
    """What a node behind the first has."""

    def __init__(self, node: str, rank: int) -> None:
        if node == "refused":
            raise ConfigError("no such model here")
        self.over, self.about = False, (node, rank, os.getpid())

    def where(self) -> Any:
        return self.about

    def watch(self) -> None:
        while not self.over:
            time.sleep(0.02)

    def end(self) -> None:
        self.over = True


def others(ctx: RankContext = CONTEXT, **named: str) -> OtherNodes:
    return OtherNodes(ctx, PART, lambda there, rank: (named.get(there.node, there.node), rank))


def test_each_node_behind_the_first_has_a_part_in_a_process_of_its_own_until_the_end() -> None:
    with local_companions() as companions:
        nodes = others()
        nodes.wait(60)
        nodes.check_alive()
        found = [companion.call("where").result(20) for companion in companions.started]
        assert [(node, rank) for node, rank, _ in found] == [("b", 1), ("c", 2)]
        assert len({os.getpid(), *(pid for _, _, pid in found)}) == 3
        nodes.end()
        assert [companion.process.is_alive() for companion in companions.started] == [False, False]
    with pytest.raises(RlsdkError, match="no worker of a cluster"):
        get_companions()


def test_what_a_node_could_not_start_for_is_raised_as_it_was() -> None:
    with local_companions():
        nodes = others(b="refused")
        with pytest.raises(ConfigError, match="no such model here"):
            nodes.wait(60)
        with pytest.raises(ConfigError, match="no such model here"):
            nodes.check_starting()
        nodes.end()


@pytest.mark.parametrize("killed", [True, False])
def test_a_part_that_ends_is_noticed(killed: bool) -> None:
    with local_companions() as companions:
        nodes = others()
        nodes.wait(60)
        last = companions.started[-1]
        if killed:
            last.process.kill()
        else:
            last.call("end").result(20)
        with pytest.raises(RlsdkError, match=r"another node ended: (the companion is gone|it left)"):
            look_until_error(nodes.check_alive)
        if killed:
            with pytest.raises(WorkerError, match="gone"):
                last.call("where").result(20)
        nodes.end()


def test_nodes_are_counted_from_the_first() -> None:
    assert node_names(CONTEXT) == ["a", "b", "c"]
    assert num_here(CONTEXT, 4) == 2
    assert num_here(RankContext(role="rollout"), 4) == 4
    assert free_port("127.0.0.1", 8) != free_port("127.0.0.1", 8)
