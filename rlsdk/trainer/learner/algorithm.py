"""Builds the algorithm of a run and the objective of its updates from the configuration."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlsdk.algorithms import PolicyObjective
from rlsdk.config import AlgorithmConfig, RunConfig
from rlsdk.interfaces import (
    Algorithm,
    AlgorithmContext,
    ConfigError,
    Example,
    PolicyLossInputs,
    Reads,
    reads_of,
)
from rlsdk.interfaces.spelling import Setting
from rlsdk.registry import ComponentKind, Registry, absolute, load_function

if TYPE_CHECKING:
    from torch import Tensor


def build_algorithm(
    config: RunConfig, registry: Registry, *, comparable: bool = True, examples: Sequence[Example] = ()
) -> Algorithm:
    """Builds the algorithm that `algorithm.name` names.

    Args:
        config: the run's configuration.
        registry: the installed backends and components.
        comparable: see `AlgorithmContext.comparable`.
        examples: see `AlgorithmContext.examples`.

    Raises:
        ConfigError: it does not exist, or cannot be built from this configuration.
    """

    def function(kind: str, name: str) -> Any:
        return registry.function(ComponentKind(kind), name)

    def portable(kind: str, name: str) -> Any:
        return component_path(name, ComponentKind(kind), registry)

    context = AlgorithmContext(
        config=config,
        options=config.algorithm.options,
        comparable=comparable,
        examples=examples,
        function=function,
        portable=portable,
    )
    algorithm: Algorithm = registry.function(ComponentKind.ALGORITHM, config.algorithm.name)(context)
    scoring = [model.path for model in config.reward_models if model.weight]
    if scoring and algorithm.max_groups is not None:
        raise ConfigError(
            f"algorithm.name {config.algorithm.name!r} replaces groups by their scores, and cannot be combined with "
            f"reward_models {scoring}, whose scores are not known when a group is judged; let `max_groups` be None, or "
            f"serve the model as a reward (`rlsdk reward serve`, `{Setting('rewards', 'URL')}`)"
        )
    return algorithm


def component_path(name: str, kind: ComponentKind, registry: Registry) -> Any:
    """Returns what a worker can resolve: `pkg.mod:fn` of a registered name, the registered function itself, or, for a
    loss in a file, an object that loads it in the worker."""
    if kind is ComponentKind.LOSS and ".py:" in name:
        return LossOfFile(absolute(name))
    return name if ":" in name else registry.target(kind, name)


def build_objective(algorithm: AlgorithmConfig, context: AlgorithmContext) -> PolicyObjective:
    """Builds the objective of the actor's updates."""
    return PolicyObjective(
        loss=context.portable("loss", algorithm.loss),
        loss_options=dict(algorithm.loss_options),
        kl_coef=0.0 if algorithm.kl_in_reward else algorithm.kl_coef,
        kl_estimator=context.portable("kl estimator", algorithm.kl_estimator),
        entropy_coef=algorithm.entropy_coef,
        divergence_coef=algorithm.distillation.coef if context.config.learns_by_divergence else 0.0,
    )


@dataclass(frozen=True)
class LossOfFile:
    """A policy loss from a file, sent to the workers as its path: the file must have the same path on every node."""

    target: str

    def __call__(self, inputs: PolicyLossInputs, **options: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Calls the function, loaded in this process."""
        losses: tuple[Tensor, Mapping[str, Tensor]] = self._function(inputs, **options)
        return losses

    @property
    def zero_without_advantage(self) -> bool:
        """The function's own attribute."""
        return bool(getattr(self._function, "zero_without_advantage", False))

    @property
    def whole_groups(self) -> bool:
        """The function's own attribute."""
        return bool(getattr(self._function, "whole_groups", False))

    @property
    def whole_samples(self) -> bool:
        """The function's own attribute."""
        return bool(getattr(self._function, "whole_samples", False))

    @property
    def reads(self) -> Reads:
        """The function's own declaration."""
        return reads_of(self._function)

    @property
    def _function(self) -> Any:
        return _loaded_loss(self.target)


@functools.cache
def _loaded_loss(target: str) -> Any:
    """Loads the loss once per process: it is needed in every micro-batch."""
    return load_function(target, what="policy loss", takes=("inputs",))
