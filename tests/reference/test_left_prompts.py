"""A call that is abandoned while some of its samples wait for a slot makes room for other calls."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rlsdk.interfaces import GenerationOutput, GenerationRequest, ModelSpec, RankContext, RolloutSpec, SamplingParams
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine
from rlsdk.testing.process.models import write_tiny_model


def test_an_abandoned_group_with_waiting_samples_makes_room(tmp_path: Path) -> None:
    """Its prompt stayed prefilled without samples; the next step of the other call added no row and failed."""
    model = ModelSpec(path=str(write_tiny_model(tmp_path / "model")), dtype="float32")
    engine = TransformersRolloutEngine()
    engine.initialize(RankContext(role="rollout"), RolloutSpec(model=model, max_running=1, max_model_tokens=128))

    async def collect(n: int, max_tokens: int) -> list[GenerationOutput]:
        sampling = SamplingParams(max_tokens=max_tokens)
        request = GenerationRequest(request_id="r", prompt_ids=(9, 10), n=n, sampling=sampling)
        return [output async for output in engine.generate([request])]

    async def left() -> list[GenerationOutput]:
        tasks = []
        for n, max_tokens in ((3, 60), (1, 4)):
            tasks.append(asyncio.create_task(collect(n, max_tokens)))
            for _ in range(4):
                await asyncio.sleep(0)
        tasks[0].cancel()
        return await tasks[1]

    assert len(asyncio.run(left())) == 1
    engine.close()
