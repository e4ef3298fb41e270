"""What the tests of the rollout engine share: requests in one line, and plain passes to hold samples against."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
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
from rlsdk.kit.guards.guarded_rollout import GuardedRolloutEngine
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine

STOP = 1
EXACT = 2e-6
"""Between log-probs of a cached, batched pass and of a plain one, both float32."""


class Served(GuardedRolloutEngine):
    """The engine as a host holds it, and what is inside of it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


def make_engine(folder: Path, *, rank: int = 0, seed: int = 0, dtype: str = "float32", **spec: Any) -> Any:
    engine = Served(TransformersRolloutEngine())
    fields = {"max_model_tokens": 64, "max_running": 7, **spec}
    engine.initialize(
        RankContext(role="rollout", rank=rank, world_size=rank + 1, seed=seed),
        RolloutSpec(model=ModelSpec(path=str(folder), dtype=dtype), **fields),
    )
    return engine


def ask(name: str, prompt: Sequence[int], n: int = 1, **sampling: Any) -> GenerationRequest:
    params = SamplingParams(**{"max_tokens": 8, "stop_token_ids": (STOP,), "seed": 7, **sampling})
    return GenerationRequest(request_id=name, prompt_ids=tuple(prompt), n=n, sampling=params)


async def collect(engine: Any, requests: Sequence[GenerationRequest]) -> list[GenerationOutput]:
    return [output async for output in engine.generate(requests)]


def run(engine: Any, requests: Sequence[GenerationRequest]) -> list[GenerationOutput]:
    return asyncio.run(collect(engine, requests))


def tokens_of(outputs: Sequence[GenerationOutput]) -> dict[tuple[str, int], list[int]]:
    return {(o.request_id, o.sample_index): o.token_ids.tolist() for o in outputs}


def distributions(plain: Any, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0) -> Tensor:
    """`[L, V]` log-probs at each position of the response, from one pass over the whole row."""
    with torch.no_grad():
        logits = plain(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return (logits.float() / temperature).log_softmax(-1)


def assert_exact(plain: Any, prompt: Sequence[int], output: GenerationOutput, temperature: float = 1.0) -> None:
    """The log-probs of a sample are those of the plain model."""
    tokens = output.token_ids.tolist()
    chosen = distributions(plain, prompt, tokens, temperature or 1.0)[range(len(tokens)), tokens]
    assert torch.allclose(torch.from_numpy(output.log_probs), chosen, atol=EXACT, rtol=1e-5)


def halves(state: Mapping[str, Tensor]) -> list[WeightShard]:
    """Every tensor in two pieces."""
    found = []
    for name, tensor in state.items():
        whole, middle = Box.whole(tuple(tensor.shape)), tensor.shape[0] // 2
        low = Box(whole.offset, (middle, *whole.size[1:]))
        high = Box((middle, *whole.offset[1:]), (tensor.shape[0] - middle, *whole.size[1:]))
        found += [WeightShard(name=name, box=box, tensor=tensor[box.slices(whole)]) for box in (low, high)]
    return found


def changed(engine: Any, seed: int = 0) -> dict[str, Tensor]:
    """Other weights for the engine's model."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: parameter + 0.02 * torch.randn(parameter.shape, generator=generator)
        for name, parameter in engine.parameters.items()
    }


def plain_with(folder: Path, state: Mapping[str, Tensor]) -> Any:
    """The plain model with these weights."""
    from rlsdk.testing.process.reference import load_plain_model

    model = load_plain_model(str(folder))
    model.load_state_dict(dict(state), strict=False)
    model.tie_weights()
    return model
