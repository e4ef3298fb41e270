"""Resources that this process and its children hold: memory, processes, ports, files, shared memory."""

from __future__ import annotations

import gc
import itertools
import os
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import and_
from pathlib import Path
from warnings import WarningMessage

import psutil
import torch

TRACKER = "resource_tracker"
"""Python's own process that frees shared resources; it lives as long as the interpreter."""
SHARED = Path("/dev/shm")
SHARED_MEMORY = "shared memory "
SEMAPHORE = "sem.mp-"
"""Prefix of the names of Python's semaphores. When this process ends, Python's resource tracker removes those of killed
processes."""
GRACE_S = 5.0
"""Seconds for processes to end and files to disappear after `close` returned."""


def resident_bytes() -> int:
    """Memory of this process and all its children."""
    gc.collect()
    processes = [psutil.Process(), *children()]
    return sum(process.memory_info().rss for process in processes if process.is_running())


def resident_handles() -> tuple[int, int]:
    """Numbers of open files (including sockets and pipes) and threads of this process; collects garbage first."""
    gc.collect()
    process = psutil.Process()
    return process.num_fds(), process.num_threads()


def tensor_bytes() -> int:
    """Memory of all torch tensors in this process; collects garbage first."""
    # Several storages may begin at the same address: views of one block of shared memory.
    largest: dict[int, int] = {}
    for pointer, size in storages():
        largest[pointer] = max(size, largest.get(pointer, 0))
    return sum(largest.values())


def storages() -> set[tuple[int, int]]:
    """(pointer, bytes) of the storages of all torch tensors in this process; collects garbage first.

    Anything may be among a process's objects, so none is asked with code of its own: not `isinstance`, for which lazy
    modules import what they stand for, and no method of a tensor's subclass."""
    gc.collect()
    found: set[tuple[int, int]] = set()
    with torch._C.DisableTorchFunctionSubclass():
        for one in gc.get_objects():
            if issubclass(type(one), torch.Tensor):
                found |= _memory(one)
    return found


def _memory(tensor: torch.Tensor) -> set[tuple[int, int]]:
    """(pointer, bytes) of one tensor, if it has memory. Sparse and opaque tensors have no storage; that of a fake
    tensor, such as a compiler's, has no address and is on the device `meta`, though the tensor says another."""
    try:
        storage = torch.Tensor.untyped_storage(tensor)
        return set() if storage.device.type == "meta" else {(storage.data_ptr(), storage.nbytes())}
    except RuntimeError:
        return set()


def num_tensors() -> int:
    """Number of torch tensors in this process; collects garbage first."""
    gc.collect()
    # Not `in`, which asks a class's metaclass.
    return sum(type(one) is torch.Tensor or type(one) is torch.nn.Parameter for one in gc.get_objects())


def objects() -> Counter[str]:
    """Numbers of this process's objects that can refer to others, by type; collects garbage first. Without tuples,
    which Python tracks or not, without counters such as this result, and without warnings, which pytest keeps."""
    gc.collect()
    return Counter(
        _type_name(type(one))
        for one in gc.get_objects()
        if not issubclass(type(one), (tuple, Counter, Warning, WarningMessage))
    )


def _type_name(kind: type) -> str:
    """Module and name of a class, whose metaclass may answer for both with code of its own."""
    module, name = (type.__dict__[part].__get__(kind) for part in ("__module__", "__qualname__"))
    return f"{module if type(module) is str else '?'}.{name}"


def grown(turns: Sequence[Counter[str]]) -> Counter[str]:
    """By how much each type's number grew at least from each turn to the next."""
    return reduce(and_, (later - earlier for earlier, later in itertools.pairwise(turns)))


@contextmanager
def only_new_objects() -> Iterator[None]:
    """Within this context `objects` counts only what was made in it, which is much faster."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def children() -> Sequence[psutil.Process]:
    """Processes that this one or its children started, without zombies."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE and TRACKER not in " ".join(process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def handles() -> dict[str, int]:
    """Numbers of threads, open files and processes of this process and its children; collects garbage first."""
    gc.collect()
    counts = {"threads": 0, "open files": 0, "processes": 0}
    for process in (psutil.Process(), *children()):
        try:
            threads, files = process.num_threads(), process.num_fds()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        counts = {
            "threads": counts["threads"] + threads,
            "open files": counts["open files"] + files,
            "processes": counts["processes"] + 1,
        }
    return counts


def cpu_seconds() -> float:
    """Processor time of this process and all its children."""
    total = 0.0
    for process in (psutil.Process(), *children()):
        try:
            times = process.cpu_times()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        total += times.user + times.system
    return total


def mapped_files() -> int:
    """Number of files that this process has mapped, including shared memory, without libraries."""
    lines = Path("/proc/self/maps").read_text().splitlines() if Path("/proc/self/maps").exists() else []
    paths = [fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6]
    return sum(path.startswith("/") and ".so" not in path for path in paths)


def settled_handles(before: dict[str, int]) -> dict[str, int]:
    """How many more `handles` there are than before, after resources that are being freed had time to disappear."""
    deadline = time.monotonic() + GRACE_S
    while True:
        now = handles()
        more = {name: count - before[name] for name, count in now.items()}
        if max(more.values()) <= 0 or time.monotonic() > deadline:
            return more
        time.sleep(0.1)


@contextmanager
def own_temporary_folder() -> Iterator[Path]:
    """An empty temporary folder for this process and the processes that it starts, so that files of other programs in
    the machine's temporary folder are not attributed to an engine."""
    # Its path is short: paths of sockets have at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="rlsdk-", ignore_cleanup_errors=True) as name:
        known, variable = tempfile.tempdir, os.environ.get("TMPDIR")
        tempfile.tempdir = os.environ["TMPDIR"] = name
        try:
            yield Path(name)
        finally:
            tempfile.tempdir = known
            if variable is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = variable


def lasting_files(folder: Path, known: Collection[str]) -> list[str]:
    """Names in a folder except the known ones, after files that are being removed had time to disappear."""
    deadline = time.monotonic() + GRACE_S
    while True:
        found = sorted(path.name for path in folder.iterdir() if path.name not in known)
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def held(scratch: Path) -> frozenset[str]:
    """Every resource that an engine could leak, each with a unique name; collects garbage first."""
    gc.collect()
    here = {f"process {process.pid}" for process in children()}
    for process in (psutil.Process(), *children()):
        try:
            connections = process.net_connections(kind="tcp")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        here |= {f"port {c.laddr.port}" for c in connections if c.status == psutil.CONN_LISTEN}
    here |= {f"file {path}" for path in scratch.rglob("*")}
    shared = {path.name for path in SHARED.glob("*") if not path.name.startswith(SEMAPHORE)}
    return frozenset(here | {f"{SHARED_MEMORY}{name}" for name in shared})


def left_behind(before: frozenset[str], scratch: Path) -> list[str]:
    """Resources that are held now but were not before, after those that are being freed had time to disappear."""
    deadline = time.monotonic() + GRACE_S
    while True:
        found = sorted(name for name in held(scratch) - before if not _belongs_to_others(name))
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def _belongs_to_others(name: str) -> bool:
    """True for shared memory that another program on this machine has mapped: it appeared during the test."""
    if not name.startswith(SHARED_MEMORY):
        return False
    ours = {os.getpid(), *(process.pid for process in children())}
    wanted = str(SHARED / name.removeprefix(SHARED_MEMORY))
    if not Path(wanted).exists():
        return True
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if int(maps.parent.name) not in ours and wanted in maps.read_text():
                return True
        except OSError:
            continue
    return False
