"""Sampling as the contract requires: draws depend only on the seed, and log-probs precede the filters."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.layers.sampler import Sampler, apply_custom_logit_processor
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from torch import Tensor

from rlsdk.kit.generation.sampling import RowSampling, draw, uniforms


class ContractSampler(Sampler):  # type: ignore[misc]
    """Replaces SGLang's sampler, which uses seeds only in a deterministic mode of some kernels, and silently replaces
    NaN logits."""

    def forward(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: Any,
        token_ids_logprobs: Any,
        positions: Tensor,
        *,
        logprob_logits: Tensor | None = None,
    ) -> Tensor:
        """`[R]` int32 tokens; their log-probs, `[R]` float32, go to `logits_output`. Where the most probable tokens
        in the places of prompt tokens are asked for, SGLang expects them of new ones, too: there are none."""
        logits = logits_output.next_token_logits
        if sampling_info.has_custom_logit_processor:
            apply_custom_logit_processor(logits, sampling_info)
        keys = sampling_info.sampling_seed.cpu().numpy().view(np.uint64)
        noise = uniforms(keys, positions.cpu().numpy().astype(np.int64), logits.shape[1])
        tokens, log_probs = draw(logits, row_sampling(sampling_info), noise)
        logits_output.next_token_logprobs = log_probs
        if any(top_logprobs_nums or ()):
            nothing = [logits.new_empty(0)] * len(logits)
            logits_output.next_token_top_logprobs_val = logits_output.next_token_top_logprobs_idx = nothing
        tokens = tokens.to(torch.int32)
        self._sync_token_ids_across_tp(tokens, sampling_info)
        return tokens


def row_sampling(info: Any) -> RowSampling:
    """Sampling parameters of the rows; in SGLang a greedy row is top-k 1 at temperature 1."""
    greedy = info.top_ks == 1
    # A limit that excludes nothing would make each step sort the whole vocabulary.
    is_limited = ~greedy & (info.top_ks < TOP_K_ALL)
    return RowSampling(
        temperature=info.temperatures.view(-1),
        greedy=greedy,
        top_k=torch.where(is_limited, info.top_ks.long(), torch.iinfo(torch.int64).max),
        top_p=info.top_ps,
        min_p=info.min_ps,
        stops=info.top_ks.new_empty((len(info.top_ks), 0), dtype=torch.int64),
    )
