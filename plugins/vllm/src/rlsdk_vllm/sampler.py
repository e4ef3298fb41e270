"""Sampling as the contract requires: draws depend only on the seed, and log-probs precede the filters."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

from rlsdk_vllm.samples import MIN_P_ARGUMENT, PRIOR_ARGUMENT, SEED_ARGUMENT

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy in vLLM."""
BLOCK = 256
"""Number of neighbouring tokens whose probabilities are summed first."""
ALMOST_ONE = 1.0 - 2.0**-53
DRAW_ELEMENTS = 1 << 22
"""Number of probabilities that are summed at once."""
_GOLDEN, _MIX_1, _MIX_2 = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class ContractSampler(Sampler):  # type: ignore[misc]
    """vLLM's sampler in mode `raw_logprobs`, with logits divided by the temperature before normalization.

    vLLM itself offers log-probs before temperature, or after every filter. Top log-probs and ranks, which are not
    needed here, are not computed: ranking the vocabulary costs as much as sampling from it.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__(logprobs_mode="raw_logprobs")
        self.topk_topp_sampler = SeededDraw(runner)
        self._temperature: Tensor | None = None
        self._is_sampling = False
        self.version = 0
        """Version of the weights."""
        self.spoiled: Tensor | bool = False
        """Whether a log-prob was not finite; on the device, so that no pass waits for it."""

    def forward(self, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        self._temperature = None if sampling_metadata.all_greedy else sampling_metadata.temperature
        self._is_sampling = True
        try:
            return super().forward(logits, sampling_metadata, *args, **kwargs)
        finally:
            # Beyond it the runner asks for log-probs of prompts, which are at temperature 1.
            self._temperature, self._is_sampling = None, False

    def compute_logprobs(self, logits: Tensor) -> Tensor:
        """`[R, V]` float32; for greedy rows at temperature 1."""
        logits = logits.float()
        if self._temperature is not None:
            temperature = self._temperature[: len(logits)]
            logits = logits / torch.where(temperature < GREEDY_BELOW, 1.0, temperature).unsqueeze(1)
        return logits.log_softmax(dim=-1)

    def gather_logprobs(self, logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
        """Log-probs of the sampled tokens only: `[R, 1]`; of prompt tokens, and then of the most probable ones in their
        places: `[R, 1 + num_logprobs]`. Ranks are replaced by the version of the weights: the engine's process reads
        tokens later and could not know it otherwise."""
        ids = token_ids.unsqueeze(-1)
        versions = torch.full_like(token_ids, self.version)
        if not self._is_sampling and num_logprobs:
            ids = torch.cat([ids, logprobs.topk(num_logprobs, dim=-1).indices], dim=-1)
        found = logprobs.gather(-1, ids)
        self.spoiled = ~found.isfinite().all() | self.spoiled
        return LogprobsTensors(ids.to(torch.int32), found, versions)


class SeededDraw(nn.Module):
    """Draws one token per row by inverting the cumulative distribution at one uniform number.

    The number is a hash of (seed, position), not the next number of a stream. A sample therefore draws the same tokens
    after preemption, with chunked prefill, and in any batch. vLLM's seeded streams guarantee none of these, and on a
    CPU they fail with chunked prefill.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self._batch = runner.input_batch
        self._requests = runner.requests

    def forward(self, logits: Tensor, generators: object, k: Tensor | None, p: Tensor | None) -> tuple[Tensor, None]:
        """`[R]` int64. `logits` are after temperature; top-k, top-p and min-p are applied here, in this order."""
        seeds, positions, floors = self._rows(len(logits))
        logits = apply_top_k_top_p(logits, k, p)
        if floors.any():
            with np.errstate(divide="ignore"):
                least = torch.from_numpy(np.log(floors))
            logits = above_floor(logits, _on(logits, least))
        levels = _on(logits, torch.from_numpy(uniforms(seeds, positions)))
        at_once = max(1, DRAW_ELEMENTS // logits.shape[1])
        parts = zip(torch.split(logits, at_once), torch.split(levels, at_once), strict=True)
        return torch.cat([draw(rows, level) for rows, level in parts]), None

    def _rows(self, num_rows: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.float64]]:
        """Seed, position in the response, and `min_p` of each row of the batch."""
        states = [self._requests[name] for name in self._batch.req_ids[:num_rows]]
        given = [state.sampling_params.extra_args for state in states]
        seeds = [arguments[SEED_ARGUMENT] for arguments in given]
        positions = [
            arguments[PRIOR_ARGUMENT] + len(state.output_token_ids)
            for arguments, state in zip(given, states, strict=True)
        ]
        floors = [arguments[MIN_P_ARGUMENT] for arguments in given]
        return np.array(seeds, np.uint64), np.array(positions, np.uint64), np.array(floors, np.float64)


def above_floor(logits: Tensor, floors: Tensor) -> Tensor:
    """`[R, V]` logits without tokens whose probability is less than a share of the largest.

    Args:
        logits: `[R, V]`; -inf: left out by other filters.
        floors: `[R]` float64: the natural logarithm of the share; -inf keeps all.
    """
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + floors.unsqueeze(1), -torch.inf)


def _on(logits: Tensor, values: Tensor) -> Tensor:
    """The values on the device of the logits."""
    if not logits.is_cuda:
        return values
    # From pinned memory, so that this thread does not wait for kernels and can prepare the next pass.
    return values.pin_memory().to(logits.device, non_blocking=True)


def draw(logits: Tensor, levels: Tensor) -> Tensor:
    """`[R]` tokens of `[R, V]` logits, at `[R]` float64 uniform numbers. A token of probability 0 is never drawn.

    First a block of neighbouring tokens is drawn, then a token of this block: the long sum over the vocabulary is
    computed once, in float32 within blocks, and only the few block sums are accumulated in float64.
    """
    probabilities = logits.softmax(dim=-1, dtype=torch.float32)
    num_tokens = probabilities.shape[1]
    even = num_tokens - num_tokens % BLOCK
    sums = torch.unflatten(probabilities[:, :even], 1, (even // BLOCK, BLOCK)).sum(-1)
    if even < num_tokens:
        sums = torch.cat([sums, probabilities[:, even:].sum(-1, keepdim=True)], dim=1)
    block, within = invert(sums, levels)
    columns = block.unsqueeze(1) * BLOCK + torch.arange(BLOCK, device=logits.device)
    inside = columns < num_tokens
    members = probabilities.gather(1, columns.clamp(max=num_tokens - 1)) * inside
    # If logits are NaN, any token is acceptable: its log-prob is NaN and shows the failure.
    return (block * BLOCK + invert(members, within)[0]).clamp_(max=num_tokens - 1)


def invert(weights: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Inverts the cumulative `[R, K]` weights at `[R]` levels in [0, 1): returns the index, and the level within it."""
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1]
    below = torch.minimum(levels * total, torch.nextafter(total, torch.zeros_like(total))).unsqueeze(1)
    found = torch.searchsorted(cumulative, below, right=True).clamp_(max=weights.shape[1] - 1)
    weight = weights.gather(1, found).double()
    within = (below - (cumulative.gather(1, found) - weight)) / weight
    return found.squeeze(1), within.squeeze(1).clamp_(0.0, ALMOST_ONE)


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) with 53 bits: element `position` of the splitmix64 stream that starts at the seed."""
    bits = seeds + (positions + np.uint64(1)) * _GOLDEN
    bits = (bits ^ (bits >> np.uint64(30))) * _MIX_1
    bits = (bits ^ (bits >> np.uint64(27))) * _MIX_2
    bits ^= bits >> np.uint64(31)
    found: NDArray[np.float64] = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return found
