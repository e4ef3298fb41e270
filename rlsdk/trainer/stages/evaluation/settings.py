"""When a run is evaluated, how the results are used, and how the evaluation sets are sampled."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rlsdk.config import EarlyStoppingConfig, EvalSetConfig, RolloutConfig, RunConfig, WatchConfig
from rlsdk.interfaces import LogProbKind, SamplingParams


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """When a stage is evaluated, and how its metrics are used."""

    every: int | None = None
    """Steps between evaluations, the last step always included; None: never."""
    at_start: bool = False
    best: WatchConfig = field(default_factory=WatchConfig)
    stopping: EarlyStoppingConfig = field(default_factory=EarlyStoppingConfig)
    save_samples: str = "never"
    """`gzip`, `plain` or `never`."""


def eval_options(config: RunConfig) -> EvalOptions:
    """When a run is evaluated, and how the results are used."""
    return EvalOptions(
        every=config.eval.every_steps,
        at_start=config.eval.at_start,
        best=config.checkpoint.best,
        stopping=config.eval.early_stopping,
        save_samples=config.eval.save_samples,
    )


def eval_sampling(part: EvalSetConfig, training: SamplingParams) -> SamplingParams:
    """Sampling parameters of an evaluation set: stop tokens of training, filters of the set."""
    return replace(
        training,
        temperature=part.temperature,
        top_p=part.top_p,
        top_k=part.top_k,
        min_p=part.min_p,
        max_tokens=part.max_response_tokens or training.max_tokens,
    )


def samples_whole_distribution(part: EvalSetConfig | RolloutConfig, kind: LogProbKind) -> bool:
    """Whether -log p of a sample estimates the policy's entropy at this temperature: True if there is no filter, and
    log-probs are those of the distribution after temperature."""
    filtered = part.top_p < 1 or part.top_k > 0 or part.min_p > 0
    return part.temperature > 0 and not filtered and (kind is not LogProbKind.RAW or part.temperature == 1)
