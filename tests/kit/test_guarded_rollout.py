"""What a rollout engine may be asked, held once for all engines, around a small engine that refuses nothing itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from rlsdk.interfaces import (
    ConfigError,
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    ModelSpec,
    RankContext,
    RlsdkError,
    RolloutEngine,
    RolloutSpec,
    SyncReceipt,
    VersionRun,
    WeightLayout,
    WeightShard,
    WeightSyncError,
)
from rlsdk.kit.guards.guarded_rollout import GuardedRolloutEngine

REQUESTS = [GenerationRequest(request_id="r", prompt_ids=(1,), n=3)]


class Willing(RolloutEngine):
    """Gives one token a sample, whatever state it is in, and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.is_busy = False
        """Refuses updates before it asks for a shard."""

    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        self.asked.append("initialize")

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        for request in requests:
            for index in range(request.n):
                yield GenerationOutput(
                    request_id=request.request_id,
                    sample_index=index,
                    token_ids=np.array([index]),
                    log_probs=np.array([-1.0], np.float32),
                    finish_reason=FinishReason.LENGTH,
                    versions=(VersionRun(0, 1),),
                )

    def layout(self) -> Sequence[WeightLayout]:
        return []

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        if self.is_busy:
            raise WeightSyncError("busy")
        list(shards)
        return SyncReceipt(version=version, num_tensors=0, num_bytes=0, fingerprints={})

    def num_decoded(self) -> int:
        return 7

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        self.asked.append("abort")

    def pause(self) -> None:
        self.asked.append("pause")

    def resume(self) -> None:
        self.asked.append("resume")

    def sleep(self, level: int = 1) -> None:
        self.asked.append(("sleep", level))

    def wake(self, parts: Sequence[str] = ("weights", "kv_cache")) -> None:
        self.asked.append(("wake", *parts))

    def close(self) -> None:
        self.asked.append("close")


def guarded(*, load_weights: bool = True) -> tuple[GuardedRolloutEngine, Willing]:
    inner = Willing()
    engine = GuardedRolloutEngine(inner)
    engine.initialize(RankContext(role="rollout"), RolloutSpec(model=ModelSpec(path="x"), load_weights=load_weights))
    inner.asked.clear()
    return engine, inner


def run(engine: RolloutEngine) -> list[int]:
    async def collect() -> list[int]:
        return [output.sample_index async for output in engine.generate(REQUESTS)]

    return asyncio.run(collect())


def breaking() -> Iterable[WeightShard]:
    raise OSError("the line is dead")
    yield


def test_without_weights_nothing_is_served_until_an_update_came() -> None:
    engine, _ = guarded(load_weights=False)
    for ask in (lambda: run(engine), engine.resume):
        with pytest.raises(WeightSyncError, match=r"no weights have arrived yet: call update_weights\(\) first"):
            ask()
    engine.update_weights([], 1)
    assert run(engine) == [0, 1, 2]


def test_an_engine_that_was_never_initialized_serves_nothing() -> None:
    with pytest.raises(WeightSyncError, match="not initialized"):
        run(GuardedRolloutEngine(Willing()))


def test_an_update_that_fails_after_its_first_shard_takes_the_weights() -> None:
    engine, inner = guarded()
    with pytest.raises(OSError, match="dead"):
        engine.update_weights(breaking(), 9)
    engine.pause()
    for ask in (lambda: run(engine), engine.resume):
        with pytest.raises(
            WeightSyncError, match="the update to version 9 failed halfway; a complete update is needed"
        ):
            ask()
    engine.update_weights([], 10)
    engine.resume()
    assert inner.asked == ["pause", "resume"]
    assert run(engine) == [0, 1, 2]


def test_an_update_that_is_refused_before_its_first_shard_changes_nothing() -> None:
    engine, inner = guarded()
    inner.is_busy = True
    with pytest.raises(WeightSyncError, match="busy"):
        engine.update_weights(breaking(), 9)
    assert run(engine) == [0, 1, 2]


@pytest.mark.parametrize("paused", [False, True])
def test_what_may_be_of_half_an_update_is_not_given_out(paused: bool) -> None:
    engine, _ = guarded()

    async def midway() -> list[int]:
        found = []
        async for output in engine.generate(REQUESTS):
            found.append(output.sample_index)
            if len(found) == 1:
                if paused:
                    engine.pause()
                with pytest.raises(OSError, match="dead"):
                    engine.update_weights(breaking(), 9)
        return found

    if paused:
        assert asyncio.run(midway()) == [0, 1, 2]
    else:
        with pytest.raises(WeightSyncError, match="samples ran while the update to version 9 failed halfway"):
            asyncio.run(midway())


def test_asleep_it_refuses_what_needs_what_sleeps() -> None:
    engine, inner = guarded()
    engine.sleep(1)
    for ask in (lambda: run(engine), engine.resume):
        with pytest.raises(RlsdkError, match=r"asleep: call wake\(\['kv_cache', 'weights'\]\) first"):
            ask()
    with pytest.raises(RlsdkError, match=r"update_weights\(\) was called while the engine is asleep"):
        engine.update_weights([], 1)
    engine.wake(("weights",))
    engine.update_weights([], 1)
    with pytest.raises(RlsdkError, match=r"asleep: call wake\(\['kv_cache'\]\) first"):
        run(engine)
    engine.wake()
    engine.wake()
    assert inner.asked == [("sleep", 1), ("wake", "weights"), ("wake", "kv_cache")]
    assert run(engine) == [0, 1, 2]


def test_sleep_is_passed_on_where_it_frees_more() -> None:
    engine, inner = guarded()
    for level in (1, 1, 2, 2, 1):
        engine.sleep(level)
    assert inner.asked == [("sleep", 1), ("sleep", 2)]
    engine.wake()
    with pytest.raises(WeightSyncError, match=r"sleep dropped the weights: call wake\(\), then update_weights\(\)"):
        run(engine)
    engine.sleep(1)
    assert inner.asked[-1] == ("sleep", 1)
    engine.wake()
    with pytest.raises(WeightSyncError, match="sleep dropped the weights"):
        run(engine)


@pytest.mark.parametrize(
    ("ask", "fault"),
    [
        (lambda engine: engine.sleep(3), "sleep: level 3; expected 1 .* or 2"),
        (lambda engine: engine.wake(("weight",)), "wake: unknown part 'weight'; did you mean 'weights'"),
    ],
)
def test_unknown_levels_and_parts_are_refused(ask: Callable[[RolloutEngine], None], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        ask(guarded()[0])


def test_sleep_is_refused_while_a_call_is_under_way_and_only_then() -> None:
    engine, inner = guarded()

    async def midway() -> None:
        async for _ in engine.generate(REQUESTS):
            with pytest.raises(RlsdkError, match=r"sleep\(\) was called while 1 calls of generate\(\) are running"):
                engine.sleep()
        left = engine.generate(REQUESTS)
        await anext(left)
        await left.aclose()  # type: ignore[attr-defined]

    asyncio.run(midway())
    engine.sleep()
    assert inner.asked == [("sleep", 1)]


def test_a_closed_engine_is_asked_for_nothing() -> None:
    engine, inner = guarded()
    assert engine.num_decoded() == 7
    engine.close()
    engine.close()
    for ask in (lambda: run(engine), engine.sleep, engine.wake, lambda: engine.update_weights([], 1)):
        with pytest.raises(RlsdkError, match="was called after the engine was closed"):
            ask()
    for harmless in (engine.abort, engine.pause, engine.resume):
        harmless()
    assert engine.num_decoded() is None
    assert inner.asked == ["close", "close"]
