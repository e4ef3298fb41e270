"""Rendezvous of the ranks of a process group without a race for a port.

The process of rank 0 opens a listening socket on a free port before it publishes the port, and keeps it open until
torch's store takes over this socket. No other process can take the port in between, and a rank that connects early
waits in the socket's queue instead of being refused.

A process that hosts several roles joins once: torch has one default group per process, so the roles share it, and the
process leaves it with the last role.
"""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from rlsdk.interfaces import ConfigError, DeadlineError, RankContext

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]  # re-exported by a star import

_BACKLOG = 4096
LAZY_RANKS = 64
"""From this number of ranks on, gloo connects two ranks only when they first communicate. Below it, it opens a socket
from every rank to every other at the start, even if it is used beside NCCL only for tensors on the host."""


@dataclass
class _Membership:
    """State of this process: sockets that wait for their group, and the group that it is in."""

    held: dict[int, socket.socket] = field(default_factory=dict)
    """Port -> listening socket."""
    roles: set[str] = field(default_factory=set)
    """Roles that use the default group."""
    size: tuple[int, int] = (0, 0)
    """Rank and world size of the default group."""
    backend: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)


_membership = _Membership()


def hold_port(host: str) -> int:
    """Opens a listening socket on a free port of `host` and holds it for `init_process_group`; returns the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(_BACKLOG)
    port = int(listener.getsockname()[1])
    with _membership.lock:
        _membership.held[port] = listener
    return port


def release_port(port: int) -> None:
    """Closes a held socket that no group took over. Unknown ports are ignored."""
    with _membership.lock:
        listener = _membership.held.pop(port, None)
    if listener is not None:
        listener.close()


def init_process_group(ctx: RankContext, backend: str) -> None:
    """Joins torch's default process group. Collective: every rank of `ctx` must call; blocks until all have.

    A second role of the same process, with the same rank and world size, shares the existing group.

    Args:
        ctx: `rank`, `world_size`, `master_addr`, `master_port` and `timeout_s` are read. The timeout becomes that of
            every collective of the group.
        backend: `gloo`, `nccl`, or torch's combined form `cpu:gloo,cuda:nccl`.

    Raises:
        ConfigError: the process is already in a group of another size or backend.
        DeadlineError: not all ranks arrived within `ctx.timeout_s`.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        _share(ctx, backend)
        return
    if ctx.world_size >= LAZY_RANKS:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    try:
        dist.init_process_group(
            backend,
            store=_open_store(ctx),
            rank=ctx.rank,
            world_size=ctx.world_size,
            timeout=timedelta(seconds=ctx.timeout_s),
            device_id=_device_id(ctx, backend),
        )
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise DeadlineError(
            f"{ctx.role} rank {ctx.rank} of {ctx.world_size} waited {ctx.timeout_s:g} s at "
            f"{ctx.master_addr}:{ctx.master_port} for the other ranks ({error}); look at the logs of the ranks that "
            "did not arrive"
        ) from error
    _membership.roles = {ctx.role}
    _membership.size = (ctx.rank, ctx.world_size)
    _membership.backend = backend


def destroy_process_group(ctx: RankContext) -> None:
    """Leaves the default group, which is destroyed with the last role of this process. Safe to call twice."""
    import torch.distributed as dist

    _membership.roles.discard(ctx.role)
    release_port(ctx.master_port)
    if dist.is_initialized() and not _membership.roles:
        dist.destroy_process_group()


def _share(ctx: RankContext, backend: str) -> None:
    """Counts another role as a user of this process's group."""
    release_port(ctx.master_port)
    size = (ctx.rank, ctx.world_size)
    if size != _membership.size or backend != _membership.backend:
        rank, world_size = _membership.size
        raise ConfigError(
            f"{ctx.role} asks for rank {ctx.rank} of {ctx.world_size} on {backend!r}, but this process is rank {rank} "
            f"of {world_size} on {_membership.backend!r} for {sorted(_membership.roles)}; give the roles pools of "
            "their own, or the same sizes and backend"
        )
    _membership.roles.add(ctx.role)


def _open_store(ctx: RankContext) -> Store:
    """Opens the key-value store of the group; rank 0 serves it on the socket that it holds."""
    import torch.distributed as dist

    if ctx.world_size == 1:
        return dist.HashStore()  # type: ignore[attr-defined]
    with _membership.lock:
        listener = _membership.held.pop(ctx.master_port, None) if ctx.rank == 0 else None
    return dist.TCPStore(  # type: ignore[attr-defined]
        ctx.master_addr,
        ctx.master_port,
        ctx.world_size,
        is_master=ctx.rank == 0,
        timeout=timedelta(seconds=ctx.timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener is not None else None,
    )


def _device_id(ctx: RankContext, backend: str) -> torch.device | None:
    """The GPU to bind the group to, so that torch does not have to guess it."""
    import torch

    return torch.device(ctx.device) if "nccl" in backend and ctx.device.startswith("cuda") else None
