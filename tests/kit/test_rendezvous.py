"""How many sockets a group of processes opens."""

from __future__ import annotations

import multiprocessing
from typing import Any

import psutil
import pytest

RANKS = 5


def member(rank: int, port: Any, lazy_ranks: int, counted: Any, answers: Any) -> None:
    import torch
    import torch.distributed as dist

    from rlsdk.interfaces import RankContext
    from rlsdk.kit.ranks import rendezvous

    torch.set_num_threads(1)
    rendezvous.LAZY_RANKS = lazy_ranks
    if rank == 0:
        own = rendezvous.hold_port("127.0.0.1")
        for _ in range(RANKS - 1):
            port.put(own)
    else:
        own = port.get(timeout=60)
    ctx = RankContext(role="actor", rank=rank, world_size=RANKS, local_rank=rank, master_port=own, timeout_s=60.0)
    rendezvous.init_process_group(ctx, "gloo")
    found = psutil.Process().net_connections("tcp")
    to_ranks = [one for one in found if one.status == "ESTABLISHED" and own not in (one.laddr.port, one.raddr.port)]
    counted.wait(60)
    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    answers.put((len(to_ranks), float(total)))
    rendezvous.destroy_process_group(ctx)


@pytest.mark.parametrize(("lazy_ranks", "sockets"), [(RANKS, 0), (RANKS + 1, RANKS - 1)], ids=["many", "few"])
def test_many_ranks_do_not_open_a_socket_to_every_other_at_the_start(lazy_ranks: int, sockets: int) -> None:
    context = multiprocessing.get_context("spawn")
    port, answers, counted = context.Queue(), context.Queue(), context.Barrier(RANKS)
    ranks = [context.Process(target=member, args=(rank, port, lazy_ranks, counted, answers)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    try:
        found = [answers.get(timeout=90) for _ in ranks]
    finally:
        for process in ranks:
            process.join(30)
            process.kill()
    assert [total for _, total in found] == [10.0] * RANKS
    if sockets == 0:
        assert all(count == 0 for count, _ in found), "none before they speak"
    else:
        assert max(count for count, _ in found) >= sockets
