"""Accuracy on rows that are never trained on: sampled and greedy."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rlsdk.trainer.experience import make_batch
from rlsdk.trainer.metrics import accuracy
from rlsdk.trainer.rollout import sample

if TYPE_CHECKING:
    from rlsdk.interfaces import SamplingParams
    from rlsdk.trainer.groups import RoleGroup
    from rlsdk.trainer.parts import RunParts


def measure_all(rollout: RoleGroup, parts: RunParts) -> dict[str, float]:
    """Figures of the weights now served on the evaluation prompts, under `eval/`.

    Samples are drawn with the same seeds every time, so two evaluations differ by the weights alone.
    """
    config = parts.config.eval
    metrics: dict[str, float] = {}
    if config.samples_per_prompt:
        plain = replace(parts.sampling, temperature=config.temperature, top_p=1.0, top_k=0, min_p=0.0)
        metrics |= measure(rollout, parts, plain, config.samples_per_prompt, "sampled")
    if config.greedy:
        metrics |= measure(rollout, parts, replace(parts.sampling, temperature=0.0), 1, "greedy")
    return metrics


def measure(rollout: RoleGroup, parts: RunParts, sampling: SamplingParams, n: int, name: str) -> dict[str, float]:
    """Accuracy (share that the first reward calls right), mean reward and length of one way of sampling."""
    token_ids = [prompt.prompt_ids for prompt in parts.eval_prompts]
    samples = sample(rollout, token_ids, sampling, n=n, seed=(parts.config.trainer.seed, "eval", name))
    result = parts.score(make_batch(token_ids, samples, temperature=1.0), parts.eval_prompts)
    return {
        f"eval/accuracy_{name}": accuracy(result),
        f"eval/reward_{name}": float(result.scores.mean()),
        f"eval/tokens_{name}": float(samples.lengths.mean()),
    }
