"""Calls registered functions once, on made-up rows, so that options which they refuse are refused before a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rlsdk.config import Problem, RewardConfig, RunConfig
from rlsdk.config.sections.algorithm import POLICY_GRADIENT
from rlsdk.interfaces import SCHEMA, Batch, ConfigError, Per, PolicyLossInputs, RewardSample, RlsdkError
from rlsdk.registry import ComponentKind, Registry

if TYPE_CHECKING:
    from torch import Tensor


def refused_options(config: RunConfig, registry: Registry) -> Iterator[Problem]:
    """Yields what registered functions say, by a ConfigError, of the options of the configuration.

    Functions that are named by module or file are not called, and neither are rewards that may be slow.
    """
    own = config.algorithm
    if own.name == POLICY_GRADIENT:
        loss = _function(registry, ComponentKind.LOSS, own.loss, own.loss_options)
        if loss is not None:
            yield from _said(lambda: loss(_inputs(), **own.loss_options), "algorithm.loss_options", own.loss_options)
        estimator = _function(registry, ComponentKind.ADVANTAGE, own.advantage, own.advantage_options)
        if estimator is not None:
            options = own.advantage_options
            yield from _said(lambda: estimator(_batch(), **options), "algorithm.advantage_options", options)
    sets: Mapping[str, tuple[RewardConfig, ...]] = {
        "rewards": config.rewards,
        **{f"eval.sets.{name}.rewards": part.rewards for name, part in config.eval.sets.items()},
    }
    for path, rewards in sets.items():
        for at, reward in enumerate(rewards):
            yield from _of_reward(registry, reward, f"{path}.{at}.options")


def _of_reward(registry: Registry, reward: RewardConfig, path: str) -> Iterator[Problem]:
    if reward.is_remote or reward.judge is not None:
        return
    function = _function(registry, ComponentKind.REWARD, reward.name, reward.options)
    if function is not None and getattr(function, "checks_rows", False):
        sample = RewardSample(prompt="", response="", answer="", row={}, truncated=False)
        yield from _said(lambda: function(sample, **reward.options), path, reward.options)


def _function(registry: Registry, kind: ComponentKind, name: str, options: Mapping[str, Any]) -> Any:
    """The registered function of this name, if it has options."""
    if not options or ":" in name:
        return None
    try:
        return registry.component(kind, name)
    except RlsdkError:
        return None  # Reported by `check_run`.


def _said(call: Callable[[], object], path: str, options: Mapping[str, Any]) -> Iterator[Problem]:
    try:
        call()
    except ConfigError as error:
        option = str(error).partition(" ")[0]
        yield Problem(f"{path}.{option}" if option in options else path, str(error))
    except Exception:  # The made-up rows may lack something that it needs.
        return


def _batch() -> Batch:
    """Two prompts with two responses of two tokens each, with every field that the trainer may add to samples of one
    chain; estimators may refuse scores of several."""
    import torch

    batch = Batch.from_rows([[1, 2, 3]] * 4)
    tokens: dict[str, Tensor] = {}
    rows: dict[str, Tensor] = {}
    for name, spec in SCHEMA.items():
        made, count = (tokens, batch.num_tokens) if spec.per is Per.TOKEN else (rows, batch.num_rows)
        made[name] = torch.ones(count, dtype=getattr(torch, spec.dtype))
    tokens["response_mask"] = torch.tensor([False, True, True] * 4)
    tokens["token_level_rewards"] = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 0.0] * 2, dtype=torch.float64)
    rows["scores"] = torch.tensor([1.0, 0.0] * 2, dtype=torch.float64)
    rows["uid"], rows["sample"] = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1])
    rows["row_id"] = torch.arange(4)
    del rows["chain_scores"]
    return batch.with_tokens(**tokens).with_rows(**rows)


def _inputs() -> PolicyLossInputs:
    import torch

    batch = _batch()
    mask = batch["response_mask"]
    ones = mask.to(torch.float32)
    log_probs = -ones
    log_probs.requires_grad_()
    return PolicyLossInputs(
        log_probs=log_probs, old_log_probs=-ones, advantages=ones, mask=mask, batch=batch, entropy=ones
    )
