"""Log-probs as the contract asks for them: after temperature, before top-k, top-p and min-p."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy to vLLM."""


class ContractSampler(Sampler):  # type: ignore[misc]
    """vLLM's sampler, in its mode `raw_logprobs`, with logits divided by the temperature before they are normalised.

    vLLM itself offers log-probs before temperature, or after every filter. Of the likeliest tokens and of ranks, which
    nobody asks for here, it computes none: ranking the whole vocabulary costs as much as sampling from it.
    """

    _temperature: Tensor | None = None

    def forward(self, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        self._temperature = None if sampling_metadata.all_greedy else sampling_metadata.temperature
        return super().forward(logits, sampling_metadata, *args, **kwargs)

    def compute_logprobs(self, logits: Tensor) -> Tensor:
        """`[R, V]` float32; a greedy row's are those of temperature 1."""
        logits = logits.float()
        if self._temperature is not None:
            temperature = self._temperature[: len(logits)]
            logits = logits / torch.where(temperature < GREEDY_BELOW, 1.0, temperature).unsqueeze(1)
        return logits.log_softmax(dim=-1)

    def gather_logprobs(self, logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
        """Of the sampled tokens alone: `[R, 1]`."""
        ids = token_ids.unsqueeze(-1)
        return LogprobsTensors(ids.to(torch.int32), logprobs.gather(-1, ids), torch.ones_like(token_ids))


def install(runner: Any) -> None:
    """Replaces the sampler of a model runner."""
    runner.sampler = ContractSampler(
        logprobs_mode=runner.sampler.logprobs_mode, use_fp64_gumbel=getattr(runner.sampler, "use_fp64_gumbel", False)
    )
