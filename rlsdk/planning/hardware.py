"""The machines that a run is planned for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from rlsdk.cluster import PlacementSpec
from rlsdk.interfaces import ConfigError, nearest
from rlsdk.interfaces.spelling import as_given

MIB, GIB = 1 << 20, 1 << 30
MEASURED = "https://thundergolfer.com/blog/nvidia-gpu-memory-capacity"
"""Source of measured memory sizes: a cloud's table of `nvidia-smi` output for its GPUs, compared with data sheets."""
GPU_MIB: Mapping[str, int] = {
    "a10": 23028,  # MEASURED; data sheet 24 GB
    "a100-40": 40960,  # MEASURED; data sheet 40 GB
    "a100": 81920,  # MEASURED; data sheet 80 GB
    "b200": 183359,  # https://github.com/NVIDIA/TensorRT-LLM/issues/10278; HGX data sheet 180 GB
    "h100": 81559,  # MEASURED; data sheet 80 GB
    "h200": 143771,  # MEASURED; data sheet 141 GB
    "h20": 97871,  # `nvidia-smi` in the test notes of the container opencc/ace; sold as 96 GB
    "l4": 23034,  # MEASURED; data sheet 24 GB
    "l40s": 46068,  # MEASURED; data sheet 48 GB
    "rtx4090": 24564,  # https://github.com/RLinf/RLinf/issues/255; sold as 24 GB
    "t4": 15360,  # MEASURED; data sheet 16 GB
    "v100": 32768,  # `nvidia-smi` in the manual of TU Delft's cluster DAIC, V100-SXM2-32GB; data sheet 32 GB
}
"""Memory in MiB as reported by `nvidia-smi`, which is what processes can use; data sheets round it to GB. It varies by
a few MiB with driver and variant. If there are several forms: SXM."""
_FORM = re.compile(r"(?P<what>[^:]+)(:(?P<nodes>\d+)x(?P<devices>\d+))?")
_BYTES = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[kmgt]?i?b?)", re.IGNORECASE)
_UNITS = {
    "": 1,
    "k": 1000,
    "m": 1000**2,
    "g": 1000**3,
    "t": 1000**4,
    "ki": 1 << 10,
    "mi": MIB,
    "gi": GIB,
    "ti": 1 << 40,
}


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Equal nodes with equal devices."""

    name: str
    device: str
    """`cuda` or `cpu`."""
    device_bytes: int | None
    """Memory of a device, or of a whole node if devices are processes on a CPU. None: unknown."""
    num_nodes: int | None = None
    """Number of nodes; None: as many as the placement needs."""
    devices_per_node: int | None = None


def parse_hardware(text: str) -> Hardware:
    """Parses `NAME` or `BYTES`, optionally followed by `:NODESxDEVICES`: `h100:8x8`, `80GiB`, `cpu`.

    Raises:
        ConfigError: neither a known name nor a number of bytes.
    """
    form = _FORM.fullmatch(text.strip())
    if form is None:
        raise ConfigError(
            f"{as_given('hardware', text)}: expected NAME or BYTES, then :NODESxDEVICES, such as h100:8x8"
        )
    what = form["what"].lower()
    nodes, devices = (int(form[key]) if form[key] else None for key in ("nodes", "devices"))
    if nodes == 0 or devices == 0:
        raise ConfigError(f"{as_given('hardware', text)}: expected at least one node with one device")
    if what == "cpu":
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return Hardware(name="cpu", device="cpu", device_bytes=memory, num_nodes=nodes, devices_per_node=devices)
    if what in GPU_MIB:
        size = GPU_MIB[what] * MIB
        return Hardware(name=what, device="cuda", device_bytes=size, num_nodes=nodes, devices_per_node=devices)
    if (amount := _BYTES.fullmatch(what)) is None:
        known = ["cpu", *GPU_MIB]
        raise ConfigError(
            f"{as_given('hardware', text)}: expected one of {known}, or bytes of a device, such as "
            f"80GiB{nearest(what, known)}"
        )
    size = int(float(amount["number"]) * _UNITS[amount["unit"].lower().removesuffix("b")])
    return Hardware(name=what, device="cuda", device_bytes=size, num_nodes=nodes, devices_per_node=devices)


def this_machine(device: str) -> Hardware:
    """The hardware of this machine, for plans without `--hardware`. GPUs are queried with `nvidia-smi`, which takes
    none."""
    if device == "cpu":
        return parse_hardware("cpu")
    sizes: list[int] = []
    if shutil.which("nvidia-smi"):
        with suppress(OSError, subprocess.SubprocessError, ValueError):
            said = subprocess.run(
                ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"],
                capture_output=True, text=True, timeout=30, check=True,
            ).stdout  # fmt: skip
            sizes = [int(line) * MIB for line in said.split()]
    return Hardware(name="this machine's GPUs", device="cuda", device_bytes=min(sizes, default=None))


def nodes_of(hardware: Hardware, placement: PlacementSpec) -> tuple[int, int]:
    """(nodes, devices per node): those of the hardware, or as many as the placement needs."""
    entries = [pool.devices_per_node for pool in placement.pools]
    longest = max(map(len, entries))
    beside = max(sum(counts[at] for counts in entries if at < len(counts)) for at in range(longest))
    return hardware.num_nodes or longest, hardware.devices_per_node or beside
