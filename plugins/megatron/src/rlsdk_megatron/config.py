"""Options of the backend `megatron`. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class MegatronOptions:
    """What only this backend knows. Ranks that are left after tensor, context and pipeline parallelism are
    data-parallel."""

    tensor_parallel: int = 1
    """Ranks over which every matrix is split. Must divide the attention heads; and divide, or be a multiple of, the
    key-value heads."""
    sequence_parallel: bool = False
    """Norms and residuals are split by position over the tensor-parallel ranks: less memory, the same traffic."""
    pipeline_parallel: int = 1
    """Stages of layers, on their own ranks. Must divide the layers."""
    virtual_stages: int = 1
    """Chunks of layers on each pipeline rank, taken in turn: smaller bubbles, more traffic. Needs a pipeline of two
    ranks at least."""
    context_parallel: int = 1
    """Ranks over which the positions of a row are split. With Transformer Engine its ring; else keys and values are
    gathered."""
    expert_parallel: int = 1
    """Ranks over which the experts of a layer are dealt; they are taken from the tensor- and data-parallel ones."""
    distributed_optimizer: bool = True
    """Data-parallel ranks share the optimizer's state and its work."""
    overlap_grad_reduce: bool = False
    """Gradients are reduced in buckets while the backward pass still runs."""
    overlap_param_gather: bool = False
    """Stepped weights are gathered in buckets while the next pass begins. Needs `distributed_optimizer`."""
    recompute: Literal["auto", "none", "selective", "full"] = "auto"
    """Which activations are computed again in the backward pass. auto: all of a layer with
    `train.activation_checkpointing`, else none. selective: those of attention."""
    transformer_engine: Literal["auto", "always", "never"] = "auto"
    """Layers from Transformer Engine, with its fused kernels. auto: on CUDA, where it is installed."""

    def place_problems(self, *, num_ranks: int, device: str, model: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """See `rlsdk.interfaces.ChecksPlace`."""
        from rlsdk_megatron.sizes import split_problems

        return split_problems(self, num_ranks=num_ranks, device=device, model=model)
