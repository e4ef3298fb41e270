"""Checks of this machine: shared memory, memory, disks, ports, limits. Facts can be passed in, for tests."""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rlsdk.diagnosis.finding import Finding, Health
from rlsdk.system.processors import usable_processors

GIB = 1 << 30
LEAST_SHARED_BYTES = 256 << 20
"""Least shared memory; with less, Ray stores objects in files."""
LITTLE_MEMORY_BYTES, LEAST_MEMORY_BYTES = 8 * GIB, 2 * GIB
LITTLE_DISK_BYTES, LEAST_DISK_BYTES = 10 * GIB, 1 * GIB
LITTLE_FILES, LEAST_FILES = 4096, 512
"""Limits of open files for a warning and a fault: Ray opens several per worker."""
LITTLE_PORTS = 1000
"""Few free ports; a Ray worker uses about twenty."""
LONGEST_SOCKET_FOLDER = 24
"""Longest path of a folder in characters: paths of sockets in it must be shorter than 108."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """Total and free bytes of a file system or of memory."""

    total_bytes: int
    free_bytes: int

    def __str__(self) -> str:
        return f"{size(self.free_bytes)} free of {size(self.total_bytes)}"


def size(num_bytes: int) -> str:
    """As text."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.0f} MiB"


def disk_space(folder: Path) -> Space | None:
    """Space of the file system of a folder; None if it does not exist."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return Space(total_bytes=usage.total, free_bytes=usage.free)


def shared_memory(
    folder: Path = Path("/dev/shm"), space: Space | None = None, contained: bool | None = None
) -> Finding:
    """Checks shared memory, for Ray's object store and transfers between processes.

    Args:
        folder: where it is mounted.
        space: its size; None: measured.
        contained: whether this is a container, where it is set from outside; None: detected.
    """
    space = disk_space(folder) if space is None else space
    contained = Path("/.dockerenv").exists() if contained is None else contained
    remount = f"mount -o remount,size=8G {folder}"
    fix = f"docker run --shm-size=8g ...  # when starting the container; from inside, as root: {remount}"
    fix = fix if contained else f"sudo {remount}"
    if space is None or not os.access(folder, os.W_OK):
        said = f"{folder} is not there" if space is None else f"{folder} cannot be written"
        mount = f"sudo mount -t tmpfs -o size=8G,mode=1777 tmpfs {folder}"
        return Finding(check="shared memory", state=Health.FAULT, found=said, fix=mount)
    if space.free_bytes >= LEAST_SHARED_BYTES:
        return Finding(check="shared memory", state=Health.OK, found=f"{space} in {folder}")
    said = f"{space} in {folder}: Ray keeps its objects in files, which is slower (below {size(LEAST_SHARED_BYTES)})"
    return Finding(check="shared memory", state=Health.WARNING, found=said, fix=fix)


def memory(space: Space | None = None) -> Finding:
    """Checks main memory, of the machine or of this process's control group."""
    space = memory_space() if space is None else space
    fix = "ps -eo rss,pid,user,args --sort=-rss | head  # who takes it"
    if space.free_bytes >= LITTLE_MEMORY_BYTES:
        return Finding(check="memory", state=Health.OK, found=str(space))
    state = Health.WARNING if space.free_bytes >= LEAST_MEMORY_BYTES else Health.FAULT
    least = LITTLE_MEMORY_BYTES if state is Health.WARNING else LEAST_MEMORY_BYTES
    why = "small models only" if state is Health.WARNING else "too little for the controller and a worker"
    return Finding(check="memory", state=state, found=f"{space}, below {size(least)}: {why}", fix=fix)


def memory_space() -> Space:
    """Memory that this process may use."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = total
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) << 10
    group = Path("/sys/fs/cgroup")
    for limit_file, used_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, used = (next(iter(_lines(group / name)), "") for name in (limit_file, used_file))
        if limit.isdigit() and used.isdigit() and int(limit) < total:
            total = int(limit)
            free = min(free, max(total - int(used), 0))
    return Space(total_bytes=total, free_bytes=free)


def run_folder(folder: Path, space: Space | None = None) -> Finding:
    """Checks the disk of checkpoints: of the folder, or of where it will be created."""
    there = folder.resolve()
    while not there.exists():
        there = there.parent
    space = disk_space(there) if space is None else space
    name = "run folder"
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK) or space is None:
        said = f"{there} is not a folder that can be written"
        elsewhere = shlex.quote(str(Path.home() / "runs"))
        fix = f"mkdir -p {elsewhere} && rlsdk train --trainer.run_dir {elsewhere} ..."
        return Finding(check=name, state=Health.FAULT, found=said, fix=fix)
    if space.free_bytes >= LITTLE_DISK_BYTES:
        return Finding(check=name, state=Health.OK, found=f"{space} at {there}")
    state = Health.WARNING if space.free_bytes >= LEAST_DISK_BYTES else Health.FAULT
    least = size(LEAST_DISK_BYTES if state is Health.FAULT else LITTLE_DISK_BYTES)
    said = f"{space} at {there}, below {least}: a checkpoint takes 12 bytes or more for each parameter"
    fix = f"{_what_is_there(there)}  # what takes it; or elsewhere: rlsdk train --trainer.run_dir DIR ..."
    return Finding(check=name, state=state, found=said, fix=fix)


def temporary_folder(folder: Path | None = None, space: Space | None = None) -> Finding:
    """Checks the folder where Ray keeps sockets, logs, and objects that do not fit into memory."""
    name = "temporary files"
    asked = os.environ.get("TMPDIR") if folder is None else None
    try:
        folder = Path(tempfile.gettempdir()) if folder is None else folder
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Finding(check=name, state=Health.FAULT, found=str(error), fix="export TMPDIR=$(mktemp -d -p /var/tmp)")
    space = (space or disk_space(folder)) or Space(total_bytes=0, free_bytes=0)
    if space.free_bytes < LEAST_DISK_BYTES:
        said = f"{space} at {folder}, below {size(LEAST_DISK_BYTES)}"
        return Finding(check=name, state=Health.WARNING, found=said, fix=_what_is_there(folder))
    if asked and Path(asked).resolve() != folder.resolve():
        said = f"TMPDIR {asked} cannot be written, or is full: {folder} is taken in its place"
        return Finding(check=name, state=Health.WARNING, found=said, fix=f"df -h {shlex.quote(asked)}; unset TMPDIR")
    if len(str(folder)) > LONGEST_SOCKET_FOLDER and not os.access("/tmp", os.W_OK):
        said = f"{folder} has {len(str(folder))} characters: Ray's sockets below it would be over the system's limit"
        return Finding(check=name, state=Health.FAULT, found=said, fix="export TMPDIR=/var/tmp")
    if not str(folder).isascii() and not os.access("/tmp", os.W_OK):
        said = f"{folder} is not ASCII, which Ray needs, and /tmp cannot be written"
        return Finding(check=name, state=Health.FAULT, found=said, fix="export TMPDIR=/var/tmp")
    return Finding(check=name, state=Health.OK, found=f"{space} at {folder}")


def open_files(limit: tuple[int, int] | None = None) -> Finding:
    """Checks the limit of open files: (now, at most without being root)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE) if limit is None else limit
    name = "open files"
    if soft == resource.RLIM_INFINITY or soft >= LITTLE_FILES:
        many = "no limit" if soft == resource.RLIM_INFINITY else f"{soft}"
        return Finding(check=name, state=Health.OK, found=f"{many} a process")
    more = hard == resource.RLIM_INFINITY or hard >= LITTLE_FILES
    fix = "ulimit -n 65536" if hard == resource.RLIM_INFINITY or hard >= 65536 else f"ulimit -n {hard}"
    fix = fix if more else "sudo prlimit --pid $$ --nofile=65536:65536"
    state = Health.WARNING if soft >= LEAST_FILES else Health.FAULT
    said = f"{soft} a process: Ray wants {LITTLE_FILES} or more where many workers run"
    return Finding(check=name, state=state, found=said, fix=fix)


def ports(num_free: int | None = None, fault: str | None = None) -> Finding:
    """Checks whether processes of this machine can connect to each other, and whether enough ports are free.

    Args:
        num_free: free ephemeral ports; None: counted.
        fault: error of a test connection, empty if it works; None: tried now.
    """
    num_free = _num_ports() if num_free is None else num_free
    fault = connection_fault() if fault is None else fault
    if fault and num_free:
        return Finding(
            check="ports",
            state=Health.FAULT,
            found=fault,
            fix="sudo ip link set lo up; sudo ip address add 127.0.0.1/8 dev lo",
        )
    if num_free < LITTLE_PORTS:
        said = f"{num_free} ports are free of those that the system deals out; a worker of Ray takes some twenty"
        more = "sudo sysctl -w net.ipv4.ip_local_port_range='16384 60999'"
        fix = f"ss -tanp  # who holds the others; to deal out more: {more}"
        return Finding(check="ports", state=Health.FAULT if fault else Health.WARNING, found=said, fix=fix)
    return Finding(
        check="ports", state=Health.OK, found=f"processes reach each other here; {num_free} ports to deal out"
    )


def connection_fault() -> str:
    """Makes a connection within this machine, as Ray and process groups do; returns the error, or an empty text."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(5)
            with socket.create_connection(server.getsockname(), timeout=5) as client:
                there, _ = server.accept()
                with there:
                    client.sendall(b"?")
                    if there.recv(1) != b"?":
                        return "a connection to 127.0.0.1 carries nothing"
    except OSError as error:
        return f"no connection to 127.0.0.1: {error}"
    return ""


def processors() -> Finding:
    """Checks the number of processors that this process may use."""
    return Finding(check="processors", state=Health.OK, found=f"{usable_processors()} to use of {os.cpu_count()}")


def _num_ports() -> int:
    """Number of ephemeral ports that are free."""
    first, last = map(int, next(iter(_lines("/proc/sys/net/ipv4/ip_local_port_range")), "49152 65535").split())
    taken = {
        int(line.split()[1].rpartition(":")[2], 16)
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in _lines(table)[1:]
    }
    return last - first + 1 - sum(first <= port <= last for port in taken)


def _what_is_there(folder: Path) -> str:
    """The command that shows what uses the space of a folder."""
    return f"du -xh {shlex.quote(str(folder))} | sort -h | tail"


def _lines(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
