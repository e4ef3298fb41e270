"""Log-probs of the tokens of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rlsdk.interfaces import Batch, Head, PromptLogProbs, RlsdkError
from rlsdk.kit.model.outputs import compute_outputs


def prompt_log_probs(model: Any, rows: Sequence[Sequence[int]], count: int) -> list[PromptLogProbs]:
    """How probable the tokens of rows are, by one pass of the plain model; `count`: of the most probable ones beside.

    Raises:
        RlsdkError: a log-prob is not finite.
    """
    names = ("log_probs", "top_ids", "top_log_probs") if count else ("log_probs",)
    batch = Batch.from_rows([list(ids) for ids in rows]).with_meta(temperature=1.0, top_k=count)
    found = {n: v.cpu() for n, v in compute_outputs(model, Head.LM, batch.to(model.device), names).items()}
    if not all(bool(found[name].isfinite().all()) for name in names if name != "top_ids"):
        raise RlsdkError(
            "the model gives logits that are not finite on a prompt: training has diverged, or the weights are damaged"
        )
    parts = zip(*(torch.split(found[name], batch.lengths.tolist()) for name in names), strict=True)
    return [_of(*(part.numpy()[1:] for part in each)) for each in parts]


def _of(log_probs: Any, top_ids: Any = None, top_log_probs: Any = None) -> PromptLogProbs:
    none = (len(log_probs), 0)
    return PromptLogProbs(
        log_probs=log_probs,
        top_ids=np.empty(none, np.int64) if top_ids is None else top_ids,
        top_log_probs=np.empty(none, np.float32) if top_log_probs is None else top_log_probs,
    )
