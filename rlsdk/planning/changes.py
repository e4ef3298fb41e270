"""Changes of a run that may make it fit, the smallest first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from rlsdk.config import RunConfig
from rlsdk.config.introspection.fields import option_fields
from rlsdk.interfaces import BackendKind
from rlsdk.planning.hardware import Hardware
from rlsdk.registry import Registry

Change = Mapping[str, object]
"""Field -> value."""
OFFLOAD = "cpu_offload"
"""Option under which train backends keep weights and optimizer state in main memory."""
NODE_DEVICES = 8
"""Devices of a node, where the hardware does not say."""
MOST_NODES = 64


def changes(config: RunConfig, registry: Registry, hardware: Hardware) -> Iterator[Sequence[Change]]:
    """Yields changes that leave what is learned as it is, from the smallest on: more devices of the hardware, and only
    then state in main memory, which makes updates slower. Those of one number of devices stand together; where the last
    of them does not help, none of the others does. Nothing for a run with pools of its own.

    Args:
        config: of a run that does not fit.
        registry: what is installed.
        hardware: that it is planned for.
    """
    if config.placement.pools:
        return
    recompute: list[Change] = [{}]
    if config.train.activation_checkpointing is not True:
        recompute.append({"train.activation_checkpointing": True})
    offload = _offload(config, registry)
    for in_memory in ({}, {offload: True}) if offload is not None else ({},):
        for size, devices in _sizes(config, hardware):
            own = config.rollout.tp_size
            splits = [own, *(tp_size for tp_size in (2, 4, 8) if own < tp_size <= devices and devices % tp_size == 0)]
            tried = [
                {**size, **({"rollout.tp_size": tp_size} if tp_size != own else {}), **again, **in_memory}
                for tp_size in splits
                for again in recompute
            ]
            if known := [change for change in tried if change]:
                yield known


def smallest(found: Iterable[Sequence[Change]], fits: Callable[[Change], bool]) -> Change | None:
    """The first of `changes` with which a run fits; None: none."""
    for same in found:
        if fits(same[-1]):
            return next((change for change in same[:-1] if fits(change)), same[-1])
    return None


def _sizes(config: RunConfig, hardware: Hardware) -> Iterator[tuple[dict[str, object], int]]:
    """The change to a number of devices, and that of a node: from those of the run on, powers of two up to a node, then
    whole nodes."""
    place = config.placement
    per_node = hardware.devices_per_node or max(NODE_DEVICES, place.devices_per_node)
    yield {}, place.devices_per_node
    if place.num_nodes == 1:
        for count in sorted({2, 4, 8, per_node}):
            if place.devices_per_node < count <= per_node:
                yield {"placement.devices_per_node": count}, count
    full = {} if place.devices_per_node == per_node else {"placement.devices_per_node": per_node}
    nodes = 2
    while nodes <= (hardware.num_nodes or MOST_NODES):
        if nodes > place.num_nodes:
            yield {"placement.num_nodes": nodes, **full}, per_node
        nodes *= 2


def _offload(config: RunConfig, registry: Registry) -> str | None:
    """The field with which the train backend keeps its state in main memory; None: it has none, or it is on."""
    options = registry.load_options(registry.backend(BackendKind.TRAIN, config.train.backend))
    if options is None or OFFLOAD not in option_fields(options) or config.train.options.get(OFFLOAD):
        return None
    return f"train.{config.train.backend}.{OFFLOAD}"
