"""What workers on other nodes inherit from this process: environment variables, a network interface."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase

from rlsdk.interfaces import PlacementError

INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
"""Variables that choose the network interface of the collective libraries."""
SECRET_WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "CREDENTIAL")
"""In the names of variables that a pattern never forwards: Ray keeps what it is given where all of its users can read
it. A name that is written out is forwarded."""
_SIOCGIFADDR = 0x8915


def forwarded(environment: Mapping[str, str], patterns: Sequence[str], interface: str | None = None) -> dict[str, str]:
    """The variables that workers get.

    Args:
        environment: variables of this process.
        patterns: names, or patterns of names such as `NCCL_*`.
        interface: network interface of every rendezvous; None: as the variables say, else each library's own choice.
    """
    found = {
        name: value
        for name, value in environment.items()
        for pattern in patterns
        if name == pattern or (fnmatchcase(name, pattern) and not any(word in name for word in SECRET_WORDS))
    }
    return found | (dict.fromkeys(INTERFACE_VARIABLES, interface) if interface is not None else {})


def address_of(interface: str) -> str:
    """IPv4 address of a network interface of this machine.

    Raises:
        PlacementError: it has no such interface, or the interface has no address; names the existing ones.
    """
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            names = sorted(name for _, name in socket.if_nameindex())
            raise PlacementError(
                f"placement.network_interface {interface!r}: {socket.gethostname()} has no IPv4 address there "
                f"({error.strerror}); its interfaces are {names}"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def choose_gloo_interface(address: str) -> None:
    """Makes gloo listen on an interface that other nodes reach, unless its variable is set: its default is the address
    of the host name, which is often loopback.

    Args:
        address: address by which Ray knows this node.
    """
    if "GLOO_SOCKET_IFNAME" not in os.environ and (name := interface_of(address)) is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name


def interface_of(address: str) -> str | None:
    """The network interface of this machine that has this IPv4 address; None where none is known to have it."""
    for _, name in socket.if_nameindex():
        with suppress(PlacementError):
            if address_of(name) == address:
                return name
    return None
