"""Reference outputs for engines: plain transformers on one unpadded row at a time, without code of rlsdk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlsdk.interfaces import Batch

LOCAL: Mapping[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""Of every `from_pretrained` here: a check reads the folder it was given, fetches nothing, and runs no code of it."""


def load_plain_model(path: str, **options: Any) -> Any:
    """A causal LM of a local folder as `from_pretrained` gives it, in evaluation mode and float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **LOCAL, **options).eval()


def plain_outputs(model: Any, batch: Batch) -> dict[str, Tensor]:
    """`log_probs` and `entropy`, flat `[N]` float32, 0 at the first position of each row; differentiable.

    `response_mask` is not looked at: multiply by it to compare with an engine, which may leave the rest at 0.
    """
    log_probs, entropy = [], []
    for ids in torch.split(batch["input_ids"], batch.lengths.tolist()):
        logs = torch.log_softmax(model(ids[None]).logits[0].float() / batch.temperature, dim=-1)[:-1]
        start = logs.new_zeros(1)
        log_probs += [start, logs.gather(1, ids[1:, None])[:, 0]]
        entropy += [start, -(logs.exp() * logs).sum(-1)]
    return {"log_probs": torch.cat(log_probs), "entropy": torch.cat(entropy)}
