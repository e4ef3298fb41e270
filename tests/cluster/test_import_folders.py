"""What the workers of a cluster import, whatever folder its driver runs in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

DRIVER = """
import json, os, sys
from rlsdk.cluster import Cluster, preset_placement

sys.path.append(sys.argv[1])
os.environ["PYTHONPATH"] = os.pathsep + os.environ.get("PYTHONPATH", "")  # an empty entry is the current folder
python, address = sys.argv[2] or None, sys.argv[3] or None
placement = preset_placement("colocate_all", ["actor"], devices_per_node=1)
with Cluster.start(placement, timeout_s=60, address=address) as cluster:
    group = cluster.create_group("actor", "cluster_hosts:ImportHost", py_executable=python)
    print("SAID", json.dumps(group.run("imports")[0]))
"""
CLUSTER = """
import sys
from rlsdk.cluster import PlacementSpec, PoolSpec
from rlsdk.cluster.ray_cluster.local import LocalRay
here = LocalRay(PlacementSpec(pools=(PoolSpec(name="all", devices_per_node=(2,)),), roles={}))
print(here._node.address, here.folder, flush=True)
sys.stdin.read()
here.stop()
"""
NAMES = ("torch", "json", "numpy", "transformers", "ray", "rlsdk", "difflib", "sitecustomize", "msvcrt")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with modules of these names, none of which may be imported."""
    (tmp_path / "here").mkdir()
    for name in NAMES:
        (tmp_path / "here" / f"{name}.py").write_text("raise SystemExit('imported from the current folder')\n")
    return tmp_path / "here"


def drive(folder: Path, *, python: str = "", address: str = "", **variables: str) -> Mapping[str, Any]:
    """What a worker of a program in this folder says of its imports."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", DRIVER, str(Path(__file__).parent), python, address], cwd=folder,
        env={**os.environ, **variables}, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (said,) = [line.removeprefix("SAID ") for line in done.stdout.splitlines() if line.startswith("SAID ")]
    found: Mapping[str, Any] = json.loads(said)
    return found


def assert_nothing_from(folder: Path, said: Mapping[str, Any]) -> None:
    for process in ("worker", "companion", "-c", "-m"):
        places = [os.path.abspath(path) for path in said[process]]
        assert str(folder) not in places, f"{process} imports from {places}"
        assert str(Path(__file__).parent) in places or process in ("-c", "-m"), "what the driver could import it can"


def test_workers_companions_and_what_they_start_import_nothing_from_the_driver_s_folder(folder: Path) -> None:
    assert_nothing_from(folder, drive(folder))


def test_nor_do_workers_of_another_environment(folder: Path, other_environment: Path) -> None:
    assert_nothing_from(folder, drive(folder, python=str(other_environment)))


def test_nor_do_workers_of_a_cluster_that_was_joined(folder: Path) -> None:
    head = subprocess.Popen(
        [sys.executable, "-P", "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder
    )
    with head:
        assert head.stdin is not None
        assert head.stdout is not None
        address, own = head.stdout.readline().split()
        said = drive(
            folder, address=address, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=f"{own}/token",
            RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
        )  # fmt: skip
        head.stdin.close()
    assert_nothing_from(folder, said)
