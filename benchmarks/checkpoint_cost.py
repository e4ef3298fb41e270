"""What checksums cost a checkpoint: `python -m benchmarks.checkpoint_cost [--gib 1] [--files 4] [--folder PATH]`.

Files are written and brought to the disk first, so that what remains is hashing what the page cache holds; on a cold
cache the disk is what is waited for. Best of three.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rlsdk.trainer.checkpoints import manifest
from rlsdk.trainer.checkpoints.checkpoint import CheckpointStore, damage, faults

BLOCK = 16 << 20


def fill(folder: Path, num_bytes: int, num_files: int) -> None:
    """Random bytes in equal files, on the disk when the call returns."""
    for number in range(num_files):
        with (folder / f"part{number}.safetensors").open("wb") as file:
            for _ in range(num_bytes // num_files // BLOCK):
                file.write(os.urandom(BLOCK))
            file.flush()
            os.fsync(file.fileno())


def blake2b(file: Path) -> None:
    """The fastest hash of Python's own library, for comparison."""
    digest = hashlib.blake2b(digest_size=16)
    for chunk in manifest._chunks(file):
        digest.update(chunk)


def best(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of wall and CPU time of the fastest of three calls."""
    times = []
    for _ in range(3):
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        times.append((time.perf_counter() - wall, time.process_time() - cpu))
    return min(times)


def main() -> None:
    """Prints one line for each operation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    num_bytes = int(options.gib * (1 << 30))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        store = CheckpointStore(Path(folder), 1)
        with store.write(1, {}) as draft:
            fill(draft, num_bytes, options.files)
        path = store.folder / "step_00000001"
        files = sorted(path.glob("*.safetensors"))
        rows: dict[str, Callable[[], object]] = {
            "verify before loading": lambda: damage(path),
            "list (manifest and sizes)": lambda: faults(path),
            "hash while sealing, one thread": lambda: [manifest._hash(file) for file in files],
            "the same with blake2b": lambda: list(map(blake2b, files)),
        }
        print(f"{options.gib:g} GiB in {len(files)} files, {os.cpu_count()} processors")
        for name, work in rows.items():
            wall, cpu = best(work)
            print(f"{name:32} {wall:8.4f} s  {cpu:8.4f} s CPU  {num_bytes / wall / 1e9:8.1f} GB/s")


if __name__ == "__main__":
    main()
