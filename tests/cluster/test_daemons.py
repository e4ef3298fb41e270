"""A daemon that dies is noticed as soon as its connections are closed, before its memory is freed."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from rlsdk.cluster.ray_cluster.daemons import check_daemons, dead_daemon, watch_daemons
from rlsdk.interfaces import WorkerError

BYTES = 256 << 20
# As an object store: memory that is shared, and is freed only when the process goes.
DAEMON = f"""
import mmap, os, socket, sys
shared = mmap.mmap(-1, {BYTES})
for at in range(0, {BYTES}, 4096):
    shared[at] = 1
connection = socket.socket(fileno=int(sys.argv[1]))  # under a name: it stays open until the process is killed
connection.sendall(b"r")
sys.stdin.read()
"""


@pytest.fixture
def daemon() -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    """A process that is watched, and this end of its connection."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-c", DAEMON, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.PIPE)
        theirs.close()
        try:
            assert ours.recv(1) == b"r"
            watch_daemons({"store": process})
            yield process, ours
        finally:
            watch_daemons({})
            process.kill()
            process.communicate()


def test_a_daemon_counts_as_dead_when_its_connection_breaks(
    daemon: tuple[subprocess.Popen[bytes], socket.socket],
) -> None:
    process, connection = daemon
    assert dead_daemon() is None
    process.kill()
    assert connection.recv(1) == b""
    found = dead_daemon()
    assert found is not None
    assert found == f"store, pid {process.pid}, killed by signal 9"
    with pytest.raises(WorkerError, match=f"a daemon of this run's Ray cluster has ended .store, pid {process.pid}"):
        check_daemons()
