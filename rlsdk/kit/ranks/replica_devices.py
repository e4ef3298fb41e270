"""Devices that the processes of a replica see, for engines that start their own processes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rlsdk.interfaces import ConfigError, RankContext, RolloutSpec

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_devices(ctx: RankContext) -> dict[str, str]:
    """Environment in which a process of this replica sees its devices on this node as `cuda:0`, `cuda:1` and so on, in
    the order of `RankContext.accelerators`. (Ray shows a worker only its own device.) Empty on a CPU, or if the devices
    are unknown (the process then inherits this one's)."""
    if ctx.device == "cpu" or not ctx.accelerators:
        return {}
    nodes = ctx.device_nodes or (ctx.node,) * len(ctx.accelerators)
    here = [name for name, node in zip(ctx.accelerators, nodes, strict=True) if node == ctx.node]
    return {VISIBLE: ",".join(here)}


def spans_nodes(ctx: RankContext) -> bool:
    """Whether devices of this replica are on other nodes."""
    return any(node != ctx.node for node in ctx.device_nodes)


def check_devices(ctx: RankContext, spec: RolloutSpec) -> None:
    """Raises `ConfigError` if the replica got another number of devices than it needs."""
    count = len(ctx.accelerators)
    if ctx.device != "cpu" and count and count != spec.num_devices:
        raise ConfigError(
            f"a replica of tp_size {spec.tp_size} x pp_size {spec.pp_size} x dp_size {spec.dp_size} takes "
            f"{spec.num_devices} devices; it was given {count}: {', '.join(ctx.accelerators)}"
        )


@contextmanager
def set_environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables for processes that are started in the block; afterwards this process's are restored.

    An existing CUDA context of this process is not affected: CUDA reads the variable once, when it starts.
    """
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
