"""Builds what a run needs in addition to engines from its configuration: tokenizer, sampling, objective, trackers."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsdk.algorithms import PolicyObjective
from rlsdk.config import AlgorithmConfig, ModelConfig, RolloutConfig, RunConfig
from rlsdk.data import AnswerEnds, PromptFormat
from rlsdk.interfaces import (
    Algorithm,
    AlgorithmContext,
    ConfigError,
    Example,
    PolicyLossInputs,
    Reads,
    Rollouter,
    SamplingParams,
    StepCallback,
    Tracker,
    TrackerContext,
    reads_of,
)
from rlsdk.kit.hf import load_tokenizer, stop_token_ids
from rlsdk.registry import ComponentKind, Registry, absolute, load_function
from rlsdk.trainer.prompt_formats import prompt_format

if TYPE_CHECKING:
    from torch import Tensor


def load_run_tokenizer(model: ModelConfig) -> Any:
    """The policy's tokenizer."""
    return load_tokenizer(
        model.tokenizer or model.path or "",
        revision=model.revision,
        trust_remote_code=model.trust_remote_code,
    )


def answer_ends(
    tokenizer: Any,
    form: PromptFormat,
    model_path: str | None,
    configured: Sequence[int | str] | None = None,
    *,
    revision: str | None = None,
) -> AnswerEnds:
    """The tokens that end an answer, in everything that is learned and in everything that is sampled.

    A learned answer ends as the chat template ends a turn; without a template, or where that ends turns with no token
    of its own, with the tokenizer's end-of-sequence token; and always with one at which responses stop.

    Args:
        tokenizer: of the model.
        form: of the prompts: whether the chat template is used.
        model_path: see `stop_token_ids`.
        configured: see `stop_token_ids`.
        revision: see `stop_token_ids`.

    Raises:
        ConfigError: as `stop_token_ids`.
    """
    turn_end = form.template(tokenizer).end if form.uses_chat_template(tokenizer) else None
    stops = stop_token_ids(tokenizer, model_path, configured, turn_end=turn_end, revision=revision)
    usual = (turn_end, tokenizer.eos_token_id, *stops)
    return AnswerEnds(learned=next(int(token) for token in usual if token in stops), stops=stops)


def run_ends(config: RunConfig, tokenizer: Any) -> AnswerEnds:
    """`answer_ends` of a run's policy."""
    rollout, model = config.rollout, config.model
    form = prompt_format(config)
    return answer_ends(tokenizer, form, model.path, rollout.stop_token_ids, revision=model.revision)


def sampling_params(rollout: RolloutConfig, ends: AnswerEnds) -> SamplingParams:
    """Sampling parameters of training."""
    return SamplingParams(
        max_tokens=rollout.max_response_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        stop_token_ids=tuple(ends.stops),
        stop_strings=rollout.stop_strings,
    )


def build_trackers(
    config: RunConfig, registry: Registry, run_dir: Path, resume_step: int | None = None
) -> list[Tracker]:
    return [
        registry.component(ComponentKind.TRACKER, name)(
            TrackerContext(
                run_dir=str(run_dir),
                run_name=run_dir.name,
                config=config.model_dump(mode="json"),
                options=config.tracking.options.get(name, {}),
                resume_step=resume_step,
            )
        )
        for name in config.tracking.trackers
    ]


def build_callbacks(names: Sequence[str], registry: Registry) -> list[StepCallback]:
    return [registry.function(ComponentKind.CALLBACK, name) for name in names]


def build_rollouter(name: str, registry: Registry) -> Rollouter:
    """Loads a registered rollouter, `pkg.mod:fn`, or `file.py:fn`.

    Raises:
        ConfigError: it does not exist, or it cannot be loaded.
    """
    rollouter: Rollouter = registry.function(ComponentKind.ROLLOUTER, name)
    return rollouter


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
            "serve the model as a reward (`rlsdk reward serve`, `--reward URL`)"
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
