"""Log-probs of the tokens of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlsdk.interfaces import Batch, Head, PromptLogProbs, RlsdkError
from rlsdk.kit.model.outputs import compute_outputs


def prompt_log_probs(model: Any, ids: Sequence[int], count: int) -> PromptLogProbs:
    """How probable the tokens of a row are, by a pass of the plain model; `count`: of the most probable ones beside.

    Raises:
        RlsdkError: a log-prob is not finite.
    """
    names = ("log_probs", "top_ids", "top_log_probs") if count else ("log_probs",)
    batch = Batch.from_rows([list(ids)]).with_meta(temperature=1.0, top_k=count).to(model.device)
    found = {name: values.cpu().numpy()[1:] for name, values in compute_outputs(model, Head.LM, batch, names).items()}
    made = PromptLogProbs(
        log_probs=found["log_probs"],
        top_ids=found.get("top_ids", np.empty((len(ids) - 1, 0), np.int64)),
        top_log_probs=found.get("top_log_probs", np.empty((len(ids) - 1, 0), np.float32)),
    )
    if not (np.isfinite(made.log_probs).all() and np.isfinite(made.top_log_probs).all()):
        raise RlsdkError(
            "the model gives logits that are not finite on a prompt: training has diverged, or the weights are damaged"
        )
    return made
