"""Access to a local cluster: only processes that hold its token, through the loopback interface.

Ray runs what any driver sends, as the user of the run. So a local cluster listens on no other interface, and every
call needs a token that is in a file which only this user can read. The file's path, never the token, is in the
environment of the cluster's processes.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rlsdk.interfaces import PlacementError

LOOPBACK = "127.0.0.1"
TLS = "RAY_USE_TLS"
_LOOPBACK_TIMEOUT_S = 5.0
_TOKEN_BYTES = 32
_MODE = "RAY_AUTH_MODE"
_TOKEN = "RAY_AUTH_TOKEN"
_TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
_LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
_ONE_MACHINE = {
    # Ray replaces a loopback address by the machine's own in every address that it is given, unless the cluster
    # cannot have a second machine. The variable's name tells where that is the default.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "GLOO_SOCKET_IFNAME": _LOOPBACK_INTERFACE,
    "NCCL_SOCKET_IFNAME": _LOOPBACK_INTERFACE,
}


def check_loopback() -> None:
    """Connects to this process over the loopback interface, by IPv4: Ray would wait for minutes.

    Raises:
        PlacementError: that does not work.
    """
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            socket.create_connection(server.getsockname(), _LOOPBACK_TIMEOUT_S).close()
    except OSError as error:
        raise PlacementError(
            f"this machine cannot connect to itself at {LOOPBACK} ({error}), over which the processes of a run talk: "
            "its loopback interface is down or has no IPv4 address, or no port is free. As root: `ip link set "
            f"{_LOOPBACK_INTERFACE} up; ip address add {LOOPBACK}/8 dev {_LOOPBACK_INTERFACE}`; `rlsdk doctor` looks"
        ) from error


def check_tls() -> None:
    """Looks at the files that Ray needs with `RAY_USE_TLS=1`: without them its processes would wait for each other
    until a timeout that does not name them.

    Raises:
        PlacementError: one is not named, or cannot be read.
    """
    if os.environ.get(TLS, "0").lower() not in ("1", "true"):
        return
    for name in ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT"):
        file = os.environ.get(name)
        if file is None:
            fault = f"{name} is not set"
        elif not os.path.isfile(file) or not os.access(file, os.R_OK):
            fault = f"{name} is {file!r}, which is no file that can be read"
        else:
            continue
        raise PlacementError(
            f"{TLS} is {os.environ[TLS]!r}, so that Ray encrypts every connection, but {fault}. Name certificate, key "
            f"and CA (RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY, RAY_TLS_CA_CERT), or unset {TLS}: a cluster of the "
            "run's own listens on the loopback interface only"
        )


def write_token(folder: str) -> Path:
    """Generates a random 256-bit token and writes it into a new file that only this user can read."""
    path = Path(folder) / "token"
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(secrets.token_hex(_TOKEN_BYTES))
    return path


@contextmanager
def closed_to_strangers(token: Path) -> Iterator[None]:
    """Inside, started Ray processes use the loopback interface and this token; so does this process from now on.

    The environment is restored at the end, so that processes started later (graders) do not learn the path.

    Raises:
        PlacementError: this Ray has no token authentication.
    """
    from ray._private import ray_constants

    cluster = {**_ONE_MACHINE, _MODE: "token", _TOKEN: None, _TOKEN_PATH: str(token)}
    several_machines = ray_constants.ENABLE_RAY_CLUSTER
    with environment(cluster):
        try:
            ray_constants.ENABLE_RAY_CLUSTER = False
            read_access_again()
            if not is_authenticated():
                raise PlacementError("this version of Ray has no token authentication; run `pip install 'ray>=2.52'`")
            yield
        finally:
            ray_constants.ENABLE_RAY_CLUSTER = several_machines


def read_access_again() -> None:
    """Makes Ray read authentication mode and token from this process's environment again; by itself it does so only
    once."""
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def is_authenticated() -> bool:
    """Whether this process sends a token with every call."""
    from ray._raylet import AuthenticationMode, get_authentication_mode  # type: ignore[attr-defined]

    return bool(get_authentication_mode() == AuthenticationMode.TOKEN)


@contextmanager
def environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Sets environment variables of this process (None: removes one) and restores them at the end."""
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
