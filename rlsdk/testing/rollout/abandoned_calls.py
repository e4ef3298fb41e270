"""Ways to abandon a call of a rollout engine, and the number of samples that run concurrently afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

from rlsdk.interfaces import GenerationOutput, GenerationRequest, RolloutEngine
from rlsdk.testing.rollout.lab import RolloutLab, collect

FULL = 48
"""Tokens of each sample when concurrent samples are counted."""

Leaving = Callable[[RolloutEngine, Sequence[GenerationRequest]], Coroutine[Any, Any, None]]


async def at_once(lab: RolloutLab, engine: RolloutEngine) -> float | None:
    """Number of samples that run concurrently: tokens that had been decoded when the first of equally long samples was
    returned, divided by their length; None: the engine does not count tokens."""
    before, found = engine.num_decoded(), None
    if before is None:
        return None
    request = lab.ask("full", lab.prompt(6, 186), lab.suite.max_running, max_tokens=FULL)
    async for _ in engine.generate([request]):
        if found is None:
            found = ((engine.num_decoded() or 0) - before) / FULL
    return found


async def _never_begun(engine: RolloutEngine, requests: Sequence[GenerationRequest]) -> None:
    await stream_of(engine, requests).aclose()


async def broken_off(engine: RolloutEngine, requests: Sequence[GenerationRequest]) -> None:
    stream = stream_of(engine, requests)
    async for _ in stream:
        break
    await stream.aclose()


async def _cancelled(engine: RolloutEngine, requests: Sequence[GenerationRequest]) -> None:
    task = asyncio.create_task(collect(engine, requests))
    for _ in range(6):
        await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def _failed(engine: RolloutEngine, requests: Sequence[GenerationRequest]) -> None:
    """The caller's code raises between two samples."""
    stream = stream_of(engine, requests)
    with suppress(ZeroDivisionError):
        try:
            async for output in stream:
                raise ZeroDivisionError(output.request_id)
        finally:
            await stream.aclose()


LEAVING: Mapping[str, Leaving] = {
    "never begun": _never_begun,
    "closed": broken_off,
    "cancelled": _cancelled,
    "an error of its caller": _failed,
}


def stream_of(engine: RolloutEngine, requests: Sequence[GenerationRequest]) -> AsyncGenerator[GenerationOutput, None]:
    return cast("AsyncGenerator[GenerationOutput, None]", engine.generate(requests))
