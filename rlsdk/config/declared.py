"""What a run's own algorithm and functions say of themselves, filled into its configuration before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlsdk.config.role_names import CRITIC, REF
from rlsdk.config.roles import needed_roles
from rlsdk.config.schema import POLICY_GRADIENT, RunConfig
from rlsdk.interfaces import RlsdkError, reads_of
from rlsdk.registry import ComponentKind, Registry

ROLE_OF_FIELD = {"values": CRITIC, "ref_log_probs": REF}
"""Fields of the batch that a model makes."""


def with_declared_roles(config: RunConfig, registry: Registry) -> RunConfig:
    """The same with `algorithm.roles` as far as an algorithm, an estimator or a loss declares more than the fields of
    the configuration ask for. Imports those that are not rlsdk's own, of which
    `needed_roles` knows: a command is refused before torch is imported. What cannot be imported is `check_run`'s to
    say."""
    here = needed_roles(config)
    wanted = [role for role in dict.fromkeys(_declared(config, registry)) if role not in here]
    if not wanted:
        return config
    algorithm = config.algorithm.model_copy(update={"roles": (*config.algorithm.roles, *wanted)})
    return config.model_copy(update={"algorithm": algorithm})


def _declared(config: RunConfig, registry: Registry) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.name != POLICY_GRADIENT:
        yield from getattr(_found(registry, ComponentKind.ALGORITHM, algorithm.name), "roles", ())
        return
    for kind, name in ((ComponentKind.ADVANTAGE, algorithm.advantage), (ComponentKind.LOSS, algorithm.loss)):
        if registry.is_own(kind, name):
            continue
        for field in reads_of(_found(registry, kind, name)).fields:
            if field in ROLE_OF_FIELD:
                yield ROLE_OF_FIELD[field]


def _found(registry: Registry, kind: ComponentKind, name: str) -> Any:
    try:
        return registry.function(kind, name)
    except RlsdkError:
        return None
