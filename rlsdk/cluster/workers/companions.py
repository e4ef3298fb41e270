"""Companions (`rlsdk.kit.ranks.companions`) as Ray actors in the bundles of this worker's own placement group."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from rlsdk.cluster.calls.messages import Failure
from rlsdk.cluster.ray_cluster.environment import address_of, choose_gloo_interface
from rlsdk.interfaces import WorkerError
from rlsdk.system.import_path import SAFE_PATH, add_import_folders, import_folders

_CALLS = 4
"""Concurrent calls of one companion: one of them may wait for as long as the companion lives."""


class CompanionActor:
    """The companion process. It claims no resources of its bundle, which the run has reserved: the engine chooses
    devices."""

    def __init__(self, import_paths: Sequence[str]) -> None:
        import ray

        add_import_folders(import_paths)
        os.environ[SAFE_PATH] = "1"
        choose_gloo_interface(ray.util.get_node_ip_address())
        self._object: Any = None

    def make(self, target: str, args: Sequence[Any]) -> Failure | None:
        """Makes the object."""
        try:
            module, _, name = target.partition(":")
            self._object = getattr(importlib.import_module(module), name)(*args)
        except BaseException as error:
            return Failure.of(error)
        return None

    def call(self, method: str, args: Sequence[Any]) -> Any:
        """The result, or a `Failure`."""
        try:
            return getattr(self._object, method)(*args)
        except BaseException as error:
            return Failure.of(error)


class RayCompanion:
    """Satisfies `rlsdk.kit.ranks.companions.Companion`."""

    def __init__(self, actor: Any, what: str) -> None:
        self._actor, self._what = actor, what

    def call(self, method: str, *args: Any) -> Future[Any]:
        return self._answered(self._actor.call.remote(method, args), method)

    def make(self, target: str, args: Sequence[Any]) -> Future[Any]:
        """Makes the object; see `Companions.start`."""
        return self._answered(self._actor.make.remote(target, args), "starting")

    def end(self) -> None:
        import ray

        ray.kill(self._actor, no_restart=True)

    def _answered(self, ref: Any, doing: str) -> Future[Any]:
        import ray

        found: Future[Any] = Future()

        def done(came: Future[Any]) -> None:
            try:
                value = came.result()
            except ray.exceptions.RayActorError as error:
                found.set_exception(WorkerError(f"{self._what} is gone ({doing}): {error}"))
            except ray.exceptions.RayError as error:
                found.set_exception(WorkerError(f"{self._what} failed ({doing}): {error}"))
            except BaseException as error:
                found.set_exception(error)
            else:
                if isinstance(value, Failure):
                    found.set_exception(value.to_error(f"{self._what} ({doing})"))
                else:
                    found.set_result(value)

        ref.future().add_done_callback(done)
        return found


class RayCompanions:
    """Satisfies `rlsdk.kit.ranks.companions.Companions`, in an actor that is in a placement group."""

    def __init__(self, network_interface: str | None = None) -> None:
        """`network_interface`: of every rendezvous; None: the address by which Ray knows this node."""
        self._interface = network_interface

    @property
    def address(self) -> str:
        """Raises: PlacementError: this machine has no such interface."""
        import ray

        own = self._interface
        return str(ray.util.get_node_ip_address()) if own is None else address_of(own)

    def start(self, bundle: int, target: str, *args: Any) -> tuple[RayCompanion, Future[Any]]:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = ray.util.get_current_placement_group()
        where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        options = {"num_cpus": 0, "num_gpus": 0, "max_concurrency": _CALLS, "scheduling_strategy": where}
        actor = ray.remote(CompanionActor).options(**options).remote(import_folders())
        companion = RayCompanion(actor, f"{target} in bundle {bundle}")
        return companion, companion.make(target, args)
