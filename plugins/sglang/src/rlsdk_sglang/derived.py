"""Tensors that SGLang's models derive from weights after loading and then compute with.

Latent attention multiplies with the two halves of `kv_b_proj`, each in its own layout. SGLang recomputes them after its
own loaders, but not after a custom loader.

Tested: 0.5.23.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlsdk.interfaces import Box, WeightSyncError, fingerprint


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Derived tensors, which are neither parameters nor buffers of their modules, by name."""
    if not hasattr(model, "post_load_weights"):
        return {}
    return {
        f"{name}.{attribute}": value
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, Tensor)
    }


@torch.no_grad()
def rebuild(model: nn.Module) -> None:
    """Recomputes them from the current weights, in place, as captured graphs read them.

    Raises:
        WeightSyncError: SGLang put them somewhere else.
    """
    before = tensors(model)
    _make(model)
    for name, tensor in tensors(model).items():
        if tensor.data_ptr() != before.get(name, tensor).data_ptr():
            raise WeightSyncError(
                f"{name!r}: SGLang moved the tensors that it derives from weights during an update, and captured "
                "graphs would read the old ones; give rollout.sglang.cuda_graphs false"
            )


@torch.no_grad()
def check(model: nn.Module) -> None:
    """Raises `WeightSyncError` if one did not match the served weights; it is recomputed."""
    before = {name: fingerprint(tensor, Box.whole(tuple(tensor.shape))) for name, tensor in tensors(model).items()}
    _make(model)
    for name, tensor in tensors(model).items():
        if name not in before or fingerprint(tensor, Box.whole(tuple(tensor.shape))) != before[name]:
            raise WeightSyncError(f"{name!r}, which SGLang derives from weights, does not match the served weights")


def _make(model: nn.Module) -> None:
    from sglang.srt.model_loader.loader import post_load_weights

    post_load_weights(model)
