"""Events in the lifetime of a rollout engine, one call each, that must not change later samples."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial

from rlsdk.interfaces import Capability, ConfigError, RolloutEngine, WeightShard, WeightSyncError
from rlsdk.testing.rollout.abandoned_calls import LEAVING
from rlsdk.testing.rollout.lab import RolloutLab, collect, pieces, whole_shards

Event = Callable[[RolloutEngine, RolloutLab], None]


def events(lab: RolloutLab) -> Mapping[str, Event]:
    """All events that the backend supports; after each, the first weights are served as version 0."""
    found: dict[str, Event] = {"refused": _refused, **{f"left, {how}": partial(_left, how) for how in LEAVING}}
    if lab.spec.takes_weights:
        found |= {
            "updated": _updated,
            "updated in pieces": _updated_in_pieces,
            "updated, and back": _updated_and_back,
            "update failed": _update_failed,
            "update of nothing": _update_of_nothing,
        }
    if Capability.ABORT in lab.spec.capabilities:
        found |= {"aborted": _aborted, "aborted by name": partial(_aborted, names=("r",)), "nothing aborted": _nothing}
    if Capability.PARTIAL_ROLLOUT in lab.spec.capabilities:
        found |= {"paused": _paused, "paused midway": partial(_paused_midway, update=False)}
        if lab.spec.takes_weights:
            found["updated in a pause"] = partial(_paused_midway, update=True)
    if Capability.SLEEP in lab.spec.capabilities:
        found |= dict(_sleeps(lab))
    return found


def _sleeps(lab: RolloutLab) -> Iterator[tuple[str, Event]]:
    """Sleep at level 1, woken in every order; at level 2; and at level 1, then level 2."""
    for parts in ((("weights", "kv_cache"),), (("weights",), ("kv_cache",)), (("kv_cache",), ("weights",))):
        yield f"slept, woken {parts}", partial(_slept, levels=(1,), parts=parts)
    if lab.spec.takes_weights:
        yield "slept, updated before it woke", partial(_slept, levels=(1,), parts=(("weights",), (), ("kv_cache",)))
        yield "slept deeply", partial(_slept, levels=(2,), parts=(("weights",), (), ("kv_cache",)))
        yield "slept deeper", partial(_slept, levels=(1, 2), parts=(("weights", "kv_cache"), ()))


def _slept(engine: RolloutEngine, lab: RolloutLab, levels: Sequence[int], parts: Sequence[Sequence[str]]) -> None:
    """Sleeps and wakes part by part; an empty entry stands for an update."""
    for level in levels:
        engine.sleep(level)
    for part in parts:
        if part:
            engine.wake(part)
        else:
            _updated(engine, lab)


def _updated(engine: RolloutEngine, lab: RolloutLab) -> None:
    engine.update_weights(whole_shards(lab.base), 0)


def _updated_in_pieces(engine: RolloutEngine, lab: RolloutLab) -> None:
    engine.update_weights(iter(pieces(lab.base)), 0)


def _updated_and_back(engine: RolloutEngine, lab: RolloutLab) -> None:
    engine.update_weights(whole_shards(lab.changed(98)), 3)
    _updated(engine, lab)


def _update_failed(engine: RolloutEngine, lab: RolloutLab) -> None:
    def source() -> Iterator[WeightShard]:
        yield from pieces(lab.base)[:5]
        raise SourceBrokeError

    with suppress(SourceBrokeError):
        engine.update_weights(source(), 4)
    _updated(engine, lab)


def _update_of_nothing(engine: RolloutEngine, lab: RolloutLab) -> None:
    with suppress(WeightSyncError):
        engine.update_weights(iter(()), 4)
    _updated(engine, lab)


def _refused(engine: RolloutEngine, lab: RolloutLab) -> None:
    with suppress(ConfigError):
        lab.run([lab.ask("r", lab.prompt(6, 117), 2, max_tokens=4), lab.ask("wrong", ())], engine)


def _aborted(engine: RolloutEngine, lab: RolloutLab, names: Sequence[str] | None = None) -> None:
    async def aborted() -> None:
        task = asyncio.create_task(collect(engine, [lab.ask("r", lab.prompt(6, 117), 3, max_tokens=60)]))
        for _ in range(3):
            await asyncio.sleep(0)
        engine.abort(names)
        await task

    lab.wait(aborted())


def _nothing(engine: RolloutEngine, lab: RolloutLab) -> None:
    engine.abort()
    engine.abort([])
    engine.abort(["unknown"])


def _paused(engine: RolloutEngine, lab: RolloutLab) -> None:
    engine.pause()
    engine.resume()


def _paused_midway(engine: RolloutEngine, lab: RolloutLab, *, update: bool) -> None:
    async def paused() -> None:
        task = asyncio.create_task(collect(engine, [lab.ask("r", lab.prompt(6, 117), 3, max_tokens=40)]))
        for _ in range(5):
            await asyncio.sleep(0)
        engine.pause()
        await asyncio.sleep(0.005)
        if update:
            engine.update_weights(whole_shards(lab.changed(98)), 3)
        engine.resume()
        await task
        if update:
            _updated(engine, lab)

    lab.wait(paused())


def _left(how: str, engine: RolloutEngine, lab: RolloutLab) -> None:
    lab.wait(LEAVING[how](engine, [lab.ask("r", lab.prompt(6, 118), 3, max_tokens=60)]))


class SourceBrokeError(Exception):
    """Raised by a source of weights."""
