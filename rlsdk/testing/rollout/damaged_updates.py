"""Weight updates with damage that an engine must refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from rlsdk.interfaces import (
    Box,
    WeightShard,
)

Damage = Callable[[list[WeightShard]], Iterator[WeightShard]]


def _missing(shards: list[WeightShard]) -> Iterator[WeightShard]:
    yield from shards[:-1]


def _unknown(shards: list[WeightShard]) -> Iterator[WeightShard]:
    yield from shards
    yield replace(shards[0], name=f"{shards[0].name}.unknown")


def _misshapen(shards: list[WeightShard]) -> Iterator[WeightShard]:
    yield from shards[:-1]
    yield replace(shards[-1], tensor=shards[-1].tensor[:1])


def _nothing(shards: list[WeightShard]) -> Iterator[WeightShard]:
    yield from ()


def _without_first(shards: list[WeightShard]) -> Iterator[WeightShard]:
    yield from shards[1:]


def _without_a_name(shards: list[WeightShard]) -> Iterator[WeightShard]:
    gone = shards[len(shards) // 2].name
    yield from (shard for shard in shards if shard.name != gone)


def _twice(shards: list[WeightShard]) -> Iterator[WeightShard]:
    """The right number of elements: one piece of a tensor comes twice, the other is missing."""
    at = next(at for at, shard in enumerate(shards) if at and shards[at - 1].box.numel >= shard.box.numel)
    yield from (*shards[:at], shards[at - 1], *shards[at + 1 :])


def _beyond(shards: list[WeightShard]) -> Iterator[WeightShard]:
    """A piece that begins one row too far and exceeds its tensor."""
    last = shards[-1]
    box = Box((last.box.offset[0] + 1, *last.box.offset[1:]), last.box.size)
    yield from (*shards[:-1], replace(last, box=box))


def _flat(shards: list[WeightShard]) -> Iterator[WeightShard]:
    """A piece with the right number of elements, but one-dimensional."""
    at = next(at for at, shard in enumerate(shards) if len(shard.box.size) == 2)
    flat = shards[at].tensor.reshape(-1)
    yield from (*shards[:at], replace(shards[at], box=Box((0,), (flat.numel(),)), tensor=flat), *shards[at + 1 :])


DAMAGES: dict[str, Damage] = {
    "a piece is missing": _missing,
    "a name is unknown": _unknown,
    "a piece has another shape than its box": _misshapen,
}
MORE_DAMAGES: dict[str, Damage] = {
    "nothing came": _nothing,
    "the first piece is missing": _without_first,
    "a tensor is missing": _without_a_name,
    "a piece came twice": _twice,
    "a piece lies beyond its tensor": _beyond,
    "a piece has another number of dimensions": _flat,
}
