"""Reference outputs for engines: plain transformers on single unpadded rows, without code of rlsdk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlsdk.interfaces import Batch

LOCAL: Mapping[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""Arguments of every `from_pretrained` here: a check reads only the given folder, downloads nothing, and runs none of
the folder's code."""
LOCAL_MODEL: Mapping[str, Any] = {**LOCAL, "adapter_kwargs": {"local_files_only": True}}
"""Those of models: where PEFT is installed, transformers looks for an adapter beside them."""


def load_plain_model(path: str, **options: Any) -> Any:
    """A causal LM from a local folder, as loaded by `from_pretrained`, in evaluation mode and float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **LOCAL_MODEL, **options).eval()


def plain_outputs(model: Any, batch: Batch) -> dict[str, Tensor]:
    """`log_probs` and `entropy`, flat `[N]` float32, 0 at the first position of each row; differentiable.

    It ignores `response_mask`: multiply by it to compare with an engine, which may return 0 outside the mask.
    """
    log_probs, entropy = [], []
    for ids in torch.split(batch["input_ids"], batch.lengths.tolist()):
        logs = torch.log_softmax(model(ids[None]).logits[0].float() / batch.temperature, dim=-1)[:-1]
        start = logs.new_zeros(1)
        log_probs += [start, logs.gather(1, ids[1:, None])[:, 0]]
        entropy += [start, -(logs.exp() * logs).sum(-1)]
    return {"log_probs": torch.cat(log_probs), "entropy": torch.cat(entropy)}
