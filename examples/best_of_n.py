"""An algorithm of your own, whole: reward-ranked fine-tuning (RAFT, Dong et al. 2023, arXiv 2304.06767). Of each
prompt's samples the best one is learned like a given answer; prompts whose samples all got the same score are left out.

    rlsdk train --model m1 --data sums.jsonl --reward gsm8k --trainer.steps 2 \
        --algorithm.name best_of_n.py:BestOfN --algorithm.options '{min_score: 0.5}'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlsdk.algorithms import Samples, SftObjective, has_signal, loss_weights, reaches
from rlsdk.interfaces import Algorithm, AlgorithmContext, Batch, ConfigError, Models, Update


class BestOfN(Algorithm):
    """Samples, keeps the best, learns it."""

    def __init__(self, context: AlgorithmContext) -> None:
        super().__init__(context)
        if odd := sorted(context.options.keys() - {"min_score"}):
            raise ConfigError(f"algorithm.options {odd}: expected min_score")
        self.min_score = float(context.options.get("min_score", 0.0))

    def prepare(self, batch: Batch, models: Models) -> tuple[Batch, Mapping[str, float]]:
        return batch, {}

    def advantages(self, batch: Batch) -> tuple[Batch, Mapping[str, float]]:
        """1 on the tokens of the first best sample of each prompt, 0 on all others."""
        samples = Samples.of(batch)
        uids, scores = samples.of_rows(batch["uid"]), samples.of_rows(batch["scores"])
        chosen = torch.zeros(samples.count)
        for uid in torch.unique(uids):
            group = ((uids == uid) & samples.valid).nonzero()[:, 0]
            if has_signal(scores[group]) and reaches(float(scores[group].max()), self.min_score):
                chosen[group[scores[group].argmax()]] = 1.0
        advantages = chosen[samples.of_token] * batch["response_mask"]
        return batch.with_tokens(advantages=advantages), {"best_of_n/rows": float(chosen.sum())}

    def updates(self, batch: Batch, *, step: int) -> Sequence[Update]:
        """One optimizer step on what was chosen; none where nothing was."""
        rows: Tensor = (batch.row_sum(batch["advantages"]) > 0).nonzero()[:, 0]
        if not len(rows):
            return []
        objective = SftObjective()
        chosen = batch.select(rows)
        chosen = chosen.with_tokens(loss_weight=loss_weights(chosen))
        every = torch.arange(len(rows))
        return [Update(role="actor", batch=chosen, rows=every, objective=objective, fields=objective.fields)]
