"""Sizes and positions that follow from a split. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from rlsdk_megatron.config import MegatronOptions

ROW_ALIGNMENT = 8
"""Embedding rows of one rank are padded to a multiple of this, for kernels and because few vocabulary sizes divide
evenly."""


def padded_vocabulary(size: int, ranks: int) -> int:
    """Rows of the embedding over all tensor-parallel ranks."""
    return -(-size // (ranks * ROW_ALIGNMENT)) * ranks * ROW_ALIGNMENT


def expert_tensor_size(options: MegatronOptions) -> int:
    """Tensor-parallel size of experts: 1 if whole experts are distributed, otherwise `tensor_parallel`."""
    return 1 if options.expert_parallel > 1 else options.tensor_parallel


@dataclass(frozen=True)
class Place:
    """Position of a rank in Megatron's order: tensor-parallel ranks are neighbours, pipeline stages are furthest
    apart."""

    tp_rank: int
    pp_rank: int
    ep_rank: int
    etp_rank: int


def place_of(rank: int, num_ranks: int, options: MegatronOptions) -> Place:
    """Position of a rank; the split must be valid."""
    stage = num_ranks // options.pipeline_parallel
    within, split = rank % stage, expert_tensor_size(options)
    return Place(
        tp_rank=within % options.tensor_parallel,
        pp_rank=rank // stage,
        ep_rank=within // split % options.expert_parallel,
        etp_rank=within % split,
    )
