"""Accuracy on rows that are never trained on: sampled and greedy."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from rlsdk.trainer.experience import make_batch
from rlsdk.trainer.metrics import first_reward_accuracy

if TYPE_CHECKING:
    from rlsdk.data import Prompt
    from rlsdk.interfaces import SamplingParams
    from rlsdk.trainer.loop import Trainer


def evaluate(trainer: Trainer) -> dict[str, float]:
    """Figures of the current weights on the evaluation prompts, under `eval/`.

    Samples are drawn with the same seeds at every evaluation, so two of them differ by the weights alone.
    """
    config = trainer.config.eval
    prompts = trainer.parts.eval_prompts
    metrics: dict[str, float] = {}
    with trainer.view.phase("eval"), ExitStack() as phase:
        trainer.enter_rollout(phase)
        if config.samples_per_prompt:
            sampling = replace(trainer.parts.sampling, temperature=config.temperature, top_p=1.0, top_k=0, min_p=0.0)
            metrics |= _measure(trainer, prompts, sampling, config.samples_per_prompt, "sampled")
        if config.greedy:
            metrics |= _measure(trainer, prompts, replace(trainer.parts.sampling, temperature=0.0), 1, "greedy")
    return metrics


def _measure(
    trainer: Trainer, prompts: Sequence[Prompt], sampling: SamplingParams, n: int, name: str
) -> dict[str, float]:
    token_ids = [prompt.prompt_ids for prompt in prompts]
    samples = trainer.generate(token_ids, sampling, n, (trainer.config.trainer.seed, "eval", name))
    batch = make_batch(token_ids, samples, temperature=1.0)
    result = trainer.parts.score(batch, prompts)
    return {
        f"eval/accuracy_{name}": first_reward_accuracy(result.by_reward, result.valid),
        f"eval/reward_{name}": float(result.scores.mean()),
        f"eval/tokens_{name}": float(samples.lengths.mean()),
    }
