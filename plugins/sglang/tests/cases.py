"""Requests in one line, weights to send, and plain passes of transformers to hold samples against."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlsdk.interfaces import (
    Box,
    GenerationOutput,
    GenerationRequest,
    ModelSpec,
    RankContext,
    RolloutSpec,
    SamplingParams,
    WeightShard,
)
from rlsdk.kit.hf import build_model, canonical_parameters
from rlsdk_sglang.config import SglangOptions
from rlsdk_sglang.engine import SglangRolloutEngine

STOP = 1
EXACT = 2e-5
"""Largest difference between log-probs of SGLang and of transformers, both float32."""


def make_engine(folder: Path, *, seed: int = 0, dtype: str = "float32", **spec: Any) -> SglangRolloutEngine:
    engine = SglangRolloutEngine()
    fields = {"max_model_tokens": 128, "max_running": 16, "options": SglangOptions(kv_cache_mb=64), **spec}
    engine.initialize(
        RankContext(role="rollout", seed=seed), RolloutSpec(model=ModelSpec(path=str(folder), dtype=dtype), **fields)
    )
    return engine


def plain_model(folder: Path, dtype: str = "float32") -> Any:
    return build_model(ModelSpec(path=str(folder), dtype=dtype)).requires_grad_(False)


def ask(name: str, prompt: Sequence[int], n: int = 1, **sampling: Any) -> GenerationRequest:
    params = SamplingParams(**{"max_tokens": 8, "stop_token_ids": (STOP,), "seed": 7, **sampling})
    return GenerationRequest(request_id=name, prompt_ids=tuple(prompt), n=n, sampling=params)


async def collect(engine: Any, requests: Sequence[GenerationRequest]) -> list[GenerationOutput]:
    return [output async for output in engine.generate(requests)]


def run(engine: Any, requests: Sequence[GenerationRequest]) -> list[GenerationOutput]:
    return asyncio.run(collect(engine, requests))


def tokens_of(outputs: Sequence[GenerationOutput]) -> dict[tuple[str, int], list[int]]:
    return {(o.request_id, o.sample_index): o.token_ids.tolist() for o in outputs}


def log_probs_of(plain: Any, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0) -> Tensor:
    """`[L]`: of each token of a response, from one pass over the whole row."""
    logits = plain(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float()
    return (logits / temperature).log_softmax(-1)[range(len(tokens)), list(tokens)]


def worst(plain: Any, requests: Sequence[GenerationRequest], outputs: Sequence[GenerationOutput]) -> float:
    """Largest difference of any log-prob from the plain model's."""
    asked = {request.request_id: request for request in requests}
    return max(
        float((torch.from_numpy(o.log_probs) - _expected(plain, asked[o.request_id], o)).abs().max()) for o in outputs
    )


def _expected(plain: Any, request: GenerationRequest, output: GenerationOutput) -> Tensor:
    return log_probs_of(plain, request.prompt_ids, output.token_ids.tolist(), request.sampling.temperature or 1.0)


def state_of(plain: Any) -> dict[str, Tensor]:
    """Canonical name -> parameter, tied copies once."""
    return {name: parameter.detach() for name, parameter in canonical_parameters(plain)[0].items()}


def changed(state: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Weights some way off."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + torch.randn(tensor.shape, generator=generator).to(tensor.dtype) * 0.05
        for name, tensor in state.items()
    }


def adopt(plain: Any, state: Mapping[str, Tensor]) -> None:
    """Gives a plain model these weights."""
    for name, parameter in state_of(plain).items():
        parameter.copy_(state[name])


def whole_shards(state: Mapping[str, Tensor]) -> Iterator[WeightShard]:
    return (WeightShard(name=name, box=Box.whole(tuple(t.shape)), tensor=t) for name, t in state.items())


def halves(state: Mapping[str, Tensor]) -> list[WeightShard]:
    """Every tensor in two pieces."""
    found = []
    for name, tensor in state.items():
        whole, middle = Box.whole(tuple(tensor.shape)), tensor.shape[0] // 3
        low = Box(whole.offset, (middle, *whole.size[1:]))
        high = Box((middle, *whole.offset[1:]), (tensor.shape[0] - middle, *whole.size[1:]))
        found += [WeightShard(name=name, box=box, tensor=tensor[box.slices(whole)]) for box in (low, high)]
    return found
