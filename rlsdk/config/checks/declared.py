"""Fills in what a run's own algorithm and functions declare about themselves, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlsdk.config.derived.roles import needed_roles
from rlsdk.config.sections.algorithm import POLICY_GRADIENT
from rlsdk.config.sections.role_kinds import filled_by
from rlsdk.config.sections.schema import RunConfig
from rlsdk.interfaces import RlsdkError, reads_of
from rlsdk.registry import ComponentKind, Registry


def with_declared_roles(config: RunConfig, registry: Registry) -> RunConfig:
    """A copy with the roles that an algorithm, an estimator or a loss declares in addition to those that the fields
    need. Imports functions that are not built in; `needed_roles` knows the built-in ones, so that a command can be
    refused before torch is imported. `check_run` reports what cannot be imported."""
    here = needed_roles(config)
    wanted = [role for role in dict.fromkeys(_declared(config, registry)) if role not in here]
    if not wanted:
        return config
    algorithm = config.algorithm.model_copy(update={"roles": (*config.algorithm.roles, *wanted)})
    return config.model_copy(update={"algorithm": algorithm})


def declared_fields(config: RunConfig, registry: Registry) -> tuple[str, ...]:
    """Fields of the batch that the functions of the policy gradient declare. Imports them, built-in ones too;
    `check_run` reports what cannot be imported."""
    return tuple(field for kind, name in _functions(config) for field in reads_of(_found(registry, kind, name)).fields)


def own_functions(config: RunConfig) -> frozenset[str]:
    """Functions of the policy gradient that are named by module or file instead of a registered name."""
    return frozenset(name for _, name in _functions(config) if ":" in name)


def _functions(config: RunConfig) -> list[tuple[ComponentKind, str]]:
    algorithm = config.algorithm
    return [
        (ComponentKind.ADVANTAGE, algorithm.advantage),
        (ComponentKind.LOSS, algorithm.loss),
        *([(ComponentKind.KL_ESTIMATOR, algorithm.kl_estimator)] if algorithm.kl_coef else []),
    ]


def _declared(config: RunConfig, registry: Registry) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.name != POLICY_GRADIENT:
        yield from getattr(_found(registry, ComponentKind.ALGORITHM, algorithm.name), "roles", ())
        return
    for kind, name in ((ComponentKind.ADVANTAGE, algorithm.advantage), (ComponentKind.LOSS, algorithm.loss)):
        if registry.is_own(kind, name):
            continue
        for field in reads_of(_found(registry, kind, name)).fields:
            yield from filled_by(field)


def _found(registry: Registry, kind: ComponentKind, name: str) -> Any:
    try:
        return registry.function(kind, name)
    except RlsdkError:
        return None
