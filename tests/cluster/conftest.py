"""One Ray for the whole folder, and one pool of four workers that most tests share."""

from __future__ import annotations

import sys
import venv
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from hypothesis import settings

from rlsdk.cluster import Cluster, PlacementSpec, PoolSpec, WorkerGroup
from rlsdk.cluster.ray_cluster.local import LocalRay

# The machine is shared with the workers that other tests keep busy.
settings.register_profile("cluster", deadline=None)
settings.load_profile("cluster")

HOSTS = "cluster_hosts"
NUM_WORKERS = 4
_ROLES = [f"role{number}" for number in range(40)]


def pool(name: str, *devices: int) -> PoolSpec:
    return PoolSpec(name=name, devices_per_node=devices)


@pytest.fixture(scope="session")
def ray_here() -> Iterator[LocalRay]:
    """A local Ray with room for ten workers at once."""
    ray = LocalRay(PlacementSpec(pools=(pool("all", 10),), roles={}))
    yield ray
    ray.stop()


@pytest.fixture(scope="session")
def cluster(ray_here: LocalRay, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    placement = PlacementSpec(pools=(pool("shared", NUM_WORKERS),), roles=dict.fromkeys(_ROLES, "shared"))
    with Cluster.start(placement, timeout_s=120, log_dir=tmp_path_factory.mktemp("run") / "logs", seed=7) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def make_group(cluster: Cluster) -> Callable[..., WorkerGroup]:
    """Makes a group of a fresh role in the shared workers."""
    numbers = count()

    def make(host: str = "EchoHost", **kwargs: object) -> WorkerGroup:
        return cluster.create_group(_ROLES[next(numbers)], f"{HOSTS}:{host}", kwargs=kwargs)

    return make


@pytest.fixture(scope="session")
def group(make_group: Callable[..., WorkerGroup]) -> WorkerGroup:
    """Four data-parallel ranks."""
    return make_group()


@pytest.fixture
def own_cluster(ray_here: LocalRay, tmp_path: Path) -> Iterator[Callable[[int], Cluster]]:
    """Starts clusters of one pool whose workers a test may ruin."""
    started: list[Cluster] = []

    def start(num_devices: int) -> Cluster:
        placement = PlacementSpec(pools=(pool("own", num_devices),), roles={"victim": "own", "other": "own"})
        started.append(Cluster.start(placement, timeout_s=120, log_dir=tmp_path))
        return started[-1]

    yield start
    for cluster in started:
        cluster.close(grace_s=0.2)


@pytest.fixture
def other_environment(tmp_path: Path) -> Path:
    """An interpreter of a virtual environment that sees this one's packages and the tests' hosts."""
    venv.create(tmp_path / "env", symlinks=True)
    (packages,) = (tmp_path / "env").glob("lib/python3*/site-packages")
    (packages / "here.pth").write_text("\n".join([*sys.path, str(Path(__file__).parent)]))
    return tmp_path / "env" / "bin" / "python"
