"""Figures on rows that are never trained on: sampled and greedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rlsdk.config import EvalConfig
from rlsdk.data import Prompt
from rlsdk.interfaces import SamplingParams
from rlsdk.rollouts import RolloutStream
from rlsdk.trainer.grading import GradeSummary
from rlsdk.trainer.sampler import Draw, sample_all


@dataclass(kw_only=True)
class Evaluation:
    """Samples the evaluation prompts and grades what comes. Samples are drawn with the same seeds every time, so two
    evaluations differ by the weights alone."""

    stream: RolloutStream
    prompts: Sequence[Prompt]
    sampling: SamplingParams
    """Of training; an evaluation has a temperature of its own, and no filters."""
    config: EvalConfig
    reward_names: Sequence[str]
    seed: int
    notices: list[str] = field(default_factory=list)
    """Of the last `run`: samples without a score."""

    def run(self) -> dict[str, float]:
        """Figures of the weights now served, under `eval/`."""
        self.notices = []
        metrics: dict[str, float] = {}
        if self.config.samples_per_prompt:
            plain = replace(self.sampling, temperature=self.config.temperature, top_p=1.0, top_k=0, min_p=0.0)
            metrics |= self._measure("sampled", plain, self.config.samples_per_prompt)
        if self.config.greedy:
            metrics |= self._measure("greedy", replace(self.sampling, temperature=0.0), 1)
        return metrics

    def _measure(self, name: str, sampling: SamplingParams, num_samples: int) -> dict[str, float]:
        """Accuracy (share of samples to which the first reward gives 1 or more), mean score and length.

        A sample without a score counts as not right, and is left out of the mean; the share of those is a figure of its
        own where there are any.
        """
        draw = Draw(source=f"eval/{name}", num_samples=num_samples, sampling=sampling)
        groups = sample_all(self.stream, self.prompts, draw, seed=(self.seed, "eval", name))
        summary = GradeSummary.of_groups(groups, self.reward_names)
        if (text := summary.text(f"evaluation ({name})")) is not None:
            self.notices.append(text)
        lengths = [s.trajectory.num_sampled for group in groups for s in group.samples if s.trajectory is not None]
        metrics = {
            f"eval/accuracy_{name}": summary.accuracy,
            f"eval/reward_{name}": summary.mean,
            f"eval/tokens_{name}": float(np.mean(lengths)) if lengths else 0.0,
        }
        if summary.num_failed:
            metrics[f"eval/invalid_share_{name}"] = summary.num_failed / summary.num_samples
        return metrics
