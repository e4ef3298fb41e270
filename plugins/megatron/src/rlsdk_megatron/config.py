"""Options of the backend `megatron`. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class MegatronOptions:
    """Options of this backend. Ranks beyond tensor, context and pipeline parallelism are data-parallel."""

    tensor_parallel: int = 1
    """Tensor-parallel size. Must divide the number of attention heads; and divide, or be a multiple of, the number of
    key-value heads."""
    sequence_parallel: bool = False
    """Splits norms and residuals by position over the tensor-parallel ranks: less memory, the same traffic."""
    pipeline_parallel: int = 1
    """Number of pipeline stages. Must divide the number of layers."""
    virtual_stages: int = 1
    """Chunks of layers per pipeline rank (interleaved schedule): smaller bubbles, more traffic. Needs at least two
    pipeline ranks."""
    context_parallel: int = 1
    """Context-parallel size: ranks over which the positions of a row are split. With Transformer Engine by ring
    attention; otherwise keys and values are gathered."""
    expert_parallel: int = 1
    """Expert-parallel size: ranks over which the experts of a layer are distributed. They are taken from the tensor-
    and data-parallel ranks."""
    distributed_optimizer: bool = True
    """Splits optimizer state and update over the data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Reduces gradients in buckets during the backward pass."""
    overlap_param_gather: bool = False
    """Gathers updated weights in buckets during the next pass. Needs `distributed_optimizer`."""
    recompute: Literal["auto", "none", "selective", "full"] = "auto"
    """Activations to recompute in the backward pass. auto: all of a layer with `train.activation_checkpointing`,
    otherwise none. selective: those of attention."""
    transformer_engine: Literal["auto", "always", "never"] = "auto"
    """Uses layers of Transformer Engine, with its fused kernels. auto: on CUDA, if it is installed."""

    def place_problems(self, *, num_ranks: int, device: str, model: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """See `rlsdk.interfaces.ChecksPlace`."""
        from rlsdk_megatron.sizes import split_problems

        return split_problems(self, num_ranks=num_ranks, device=device, model=model)
