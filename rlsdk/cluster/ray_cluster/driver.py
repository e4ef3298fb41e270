"""This process as the driver of a Ray cluster: the only call of `ray.init`.

By itself Ray lets the driver's surroundings decide what workers are: it puts the driver's current folder, and that of
its script, before the installed packages in every worker; it uploads the current folder of a program that `uv run`
started; and variables that are meant for another cluster or job choose addresses, resources and environments.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlsdk.cluster.ray_cluster.access import environment
from rlsdk.interfaces import PlacementError
from rlsdk.interfaces.spelling import Setting
from rlsdk.system.import_path import PYTHON_PATH, SAFE_PATH, clean_python_path

_log = logging.getLogger(__name__)

ANOTHER_CLUSTER_S = (
    "RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_EXTERNAL_STORAGE_NAMESPACE", "RAY_GCS_SERVER_PORT",
    "RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_NAMESPACE", "RAY_OVERRIDE_JOB_RUNTIME_ENV", "RAY_OVERRIDE_LABELS",
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING", "RAY_OVERRIDE_RESOURCES", "RAY_REDIS_ADDRESS", "RAY_REDIS_PASSWORD",
    "RAY_RUNTIME_ENV", "RAY_RUNTIME_ENV_HOOK", "RAY_RUNTIME_ENV_PLUGINS", "RAY_START_HOOK",
    "RAY_external_storage_namespace", "RAY_gcs_storage",
)  # fmt: skip
"""Variables that say which cluster or job a program belongs to, or what a node of it has."""


@contextmanager
def own_cluster_variables() -> Iterator[None]:
    """Inside, started Ray processes know nothing of another cluster, and import nothing from the current folder."""
    given = [name for name in ANOTHER_CLUSTER_S if os.environ.get(name)]
    if given:
        _log.warning(
            "this run starts its own Ray cluster, so %s %s no effect; `%s` joins a running cluster",
            ", ".join(given),
            "has" if len(given) == 1 else "have",
            Setting("placement.ray_address", "auto"),
        )
    own: dict[str, str | None] = {PYTHON_PATH: clean_python_path() or None, SAFE_PATH: "1"}
    with environment(dict.fromkeys(ANOTHER_CLUSTER_S) | own):
        yield


def become_driver(**options: Any) -> None:
    """Calls `ray.init` with these options. Workers import what is installed for them; what this process imports from
    other folders comes after it (`rlsdk.system.import_path`).

    Raises:
        Exception: those of `ray.init`.
    """
    import ray
    from ray._private import ray_constants

    with _changed(ray_constants, "RAY_ENABLE_UV_RUN_RUNTIME_ENV", False):
        ray.init(job_config=_job_config(), log_to_driver=False, logging_level=logging.ERROR, **options)


def check_no_client() -> None:
    """Leaves the client mode that `RAY_CLIENT_MODE=1` turns on for all of Ray, which is made for Ray's own tests.

    Raises:
        PlacementError: this process is connected through Ray Client, which has neither actors' deaths nor placement.
    """
    from ray._private import client_mode_hook as hook
    from ray.util.client import ray as client

    if client.is_connected():
        raise PlacementError(
            "this process is connected to its cluster through Ray Client (ray://HOST:PORT); call ray.shutdown(), and "
            "run this program on a machine of the cluster with placement.ray_address HOST:PORT or auto"
        )
    if hook.is_client_mode_enabled or hook.is_client_mode_enabled_by_default:
        _log.warning(
            "RAY_CLIENT_MODE has no effect: a run is no client of Ray, but a driver on a machine of its cluster"
        )
        hook.is_client_mode_enabled = hook.is_client_mode_enabled_by_default = False


def _job_config() -> Any:
    from ray.job_config import JobConfig

    class OwnImports(JobConfig):  # type: ignore[misc]  # Ray ships no types
        """Ray appends folders to this attribute; each of them would come first in every worker."""

        _py_driver_sys_path = property(lambda _: [], lambda _, __: None)

    return OwnImports()


@contextmanager
def _changed(module: Any, name: str, value: object) -> Iterator[None]:
    """Sets a constant of a module, if it has it, and restores it at the end."""
    if not hasattr(module, name):
        yield
        return
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
