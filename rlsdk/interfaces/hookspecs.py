"""Everything a plugin can add, on one screen.

A plugin is a distribution with an entry point in the group `rlsdk` that names a light module. The module implements any
of these hooks with `@hookimpl`; each hook may call `register` several times. `target` is "package.module:attribute"
(imported when used) or the object itself. Built-ins register through the same hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pluggy

from rlsdk.interfaces.backend import BackendSpec

ENTRY_POINT_GROUP = "rlsdk"
hookspec = pluggy.HookspecMarker("rlsdk")
hookimpl = pluggy.HookimplMarker("rlsdk")

RegisterBackend = Callable[[BackendSpec], None]
RegisterComponent = Callable[..., None]
"""`register(name, target, description="", *, requires="", install_hint="")`: the fields of `ComponentSpec`."""


class Hooks:
    """The hook specifications."""

    @hookspec
    def rlsdk_register_backends(self, register: RegisterBackend) -> Any:
        """Train and rollout engines: `register(BackendSpec(...))`."""

    @hookspec
    def rlsdk_register_algorithms(self, register: RegisterComponent) -> Any:
        """Algorithms (`Algorithm`): classes that are called with an `AlgorithmContext`; chosen by `algorithm.name`."""

    @hookspec
    def rlsdk_register_advantages(self, register: RegisterComponent) -> Any:
        """Advantage estimators (`AdvantageEstimator`)."""

    @hookspec
    def rlsdk_register_losses(self, register: RegisterComponent) -> Any:
        """Policy losses (`PolicyLoss`)."""

    @hookspec
    def rlsdk_register_aggregations(self, register: RegisterComponent) -> Any:
        """Loss aggregations (`LossAggregation`)."""

    @hookspec
    def rlsdk_register_kl_estimators(self, register: RegisterComponent) -> Any:
        """Estimators of the KL to the reference (`KlEstimator`)."""

    @hookspec
    def rlsdk_register_rewards(self, register: RegisterComponent) -> Any:
        """Rewards (`RewardFn` or `BatchRewardFn`)."""

    @hookspec
    def rlsdk_register_datasets(self, register: RegisterComponent) -> Any:
        """Data sources (`DataSource`): NAME is the part of `--data NAME:REST` before the colon."""

    @hookspec
    def rlsdk_register_trackers(self, register: RegisterComponent) -> Any:
        """Trackers: called with a `TrackerContext`, returns a `Tracker`."""

    @hookspec
    def rlsdk_register_sharding_managers(self, register: RegisterComponent) -> Any:
        """ShardingManagers for a pair: name is "train+rollout", "*" stands for any ("*+*" is the generic one)."""

    @hookspec
    def rlsdk_register_callbacks(self, register: RegisterComponent) -> Any:
        """Step callbacks (`StepCallback`), chosen by name in `trainer.callbacks`."""

    @hookspec
    def rlsdk_register_rollouters(self, register: RegisterComponent) -> Any:
        """Rollouters (`Rollouter`): how a prompt becomes one sample; chosen by `rollout.rollouter`."""

    @hookspec
    def rlsdk_register_environments(self, register: RegisterComponent) -> Any:
        """Environments: called with the REST of `rollout.environment: NAME:REST`, returns a class (`Environment`)."""

    @hookspec
    def rlsdk_register_sandboxes(self, register: RegisterComponent) -> Any:
        """Sandboxes (`Sandbox`): called with options, by `rlsdk.agents.open_sandbox(NAME, ...)`."""
