"""All transports of a bucket's bytes, and the choice by name. One object per (source, target) at each end."""

from __future__ import annotations

from collections.abc import Sequence

from rlsdk.interfaces import ConfigError, nearest
from rlsdk.interfaces.settings import transport_name
from rlsdk.sharding.transports.in_process import InProcessTransport
from rlsdk.sharding.transports.object_store import ObjectStoreTransport
from rlsdk.sharding.transports.process_group import ProcessGroupTransport
from rlsdk.sharding.transports.remote_memory import RemoteMemoryTransport
from rlsdk.sharding.transports.ring_transport import DeviceRingTransport, RingTransport
from rlsdk.sharding.transports.transport import Transport

TRANSPORTS: tuple[type[Transport], ...] = (
    InProcessTransport,
    RingTransport,
    ObjectStoreTransport,
    DeviceRingTransport,
    ProcessGroupTransport,
    RemoteMemoryTransport,
)
"""In order of preference. Transports after one that works everywhere are used between two accelerators
(`Transport.stays_on_device`), or if they are named explicitly."""


def named_transports(names: Sequence[str] | None) -> tuple[type[Transport], ...]:
    """The transports with these names, in this order; None: all, in order of preference.

    Raises:
        ConfigError: a name is unknown.
    """
    if names is None:
        return TRANSPORTS
    known = {transport.name: transport for transport in TRANSPORTS}
    names = list(dict.fromkeys(map(transport_name, names)))
    for name in names:
        if name not in known:
            raise ConfigError(f"transport {name!r} does not exist{nearest(name, known)}; known: {sorted(known)}")
    return tuple(known[name] for name in names)


def allowed_transports(setting: str) -> tuple[str, ...] | None:
    """Names that `sharding.transport` allows, in order of preference; None: all. A named transport is for transfers
    between processes; within one process, where it may not work, views are used. NCCL works between nodes and the
    device ring within one: if either is named, the other handles the remaining pairs. `ring` is the device ring too."""
    if setting == "auto":
        return None
    setting = transport_name(setting)
    devices = (DeviceRingTransport.name, ProcessGroupTransport.name)
    others = devices if setting in devices else devices[:1] if setting == RingTransport.name else ()
    return tuple(dict.fromkeys((setting, InProcessTransport.name, *others)))


def make_transport(name: str, num_targets: int = 1) -> Transport:
    """A new end of the transport with this name.

    Args:
        name: of a transport.
        num_targets: on a source's end, the number of targets that share its memory.
    """
    (kind,) = named_transports([name])
    return kind(num_targets) if issubclass(kind, RingTransport) else kind()
