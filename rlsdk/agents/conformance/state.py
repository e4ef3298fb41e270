"""Requirements on state: what an object says depends on its row, its seed and its calls, and on nothing else."""

from __future__ import annotations

import asyncio
import inspect
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from rlsdk.agents.conformance.drawing import Call, misfits
from rlsdk.agents.conformance.lab import Lab, Player, score_of
from rlsdk.agents.conformance.outside import watched
from rlsdk.agents.conformance.requirement import LeftOut

SHOWN = 120
"""Characters of a result in a message."""


async def is_built_alone(lab: Lab) -> AsyncIterator[str]:
    """Built and reset three times without network or files outside of its folder."""
    file = inspect.getfile(lab.environment.make)
    with watched(Path(file).parent) as found:
        for _ in range(3):
            player = await lab.open(lab.rows[0])
            await player.close()
    for one in found:
        yield f"it {one} to be built or reset; give it what it needs in `reset`'s row, or in its folder"


async def takes_every_row(lab: Lab) -> AsyncIterator[str]:
    """`reset` takes every row of the data."""
    for at, row in enumerate(lab.rows):
        try:
            player = await lab.open(row)
        except Exception as error:
            yield f"row {at} ({sorted(row)}): {type(error).__name__}: {error}"
            return
        await player.close()


async def repeats(lab: Lab) -> AsyncIterator[str]:
    """The same row, seed and calls say the same."""
    for row, seed, calls in lab.scripts("repeats", 8):
        first, second = [await lab.transcript(row, seed, calls) for _ in range(2)]
        if first != second:
            yield f"two objects of one row and one seed: {_difference(first, second)}"


async def is_left_alone(lab: Lab) -> AsyncIterator[str]:
    """Another object, row or seed changes nothing for an object in use."""
    for at, (row, seed, calls) in enumerate(lab.scripts("alone", 6)):
        expected = await lab.transcript(row, seed, calls)
        player = await lab.open(row, seed)
        beside = await lab.open(lab.rows[(at + 1) % len(lab.rows)], seed + 1)
        try:
            said = await player.play(calls)
        finally:
            await player.close()
            await beside.close()
        if said != expected:
            yield f"an object says something else once another was reset: {_difference(expected, said)}"


async def shares_nothing(lab: Lab) -> AsyncIterator[str]:
    """Eight objects whose calls are mixed say what they say one by one."""
    cases = lab.scripts("mixed", 8)
    alone = [await lab.transcript(*case) for case in cases]
    players = [await lab.open(row, seed) for row, seed, _ in cases]
    said = [[player.observation] for player in players]
    try:
        for turn in range(max(len(calls) for _, _, calls in cases)):
            for at, (_, _, calls) in enumerate(cases):
                if turn < len(calls) and not players[at].done:
                    said[at].append(await players[at].call(*calls[turn]))
        for at, player in enumerate(players):
            said[at].append(repr(await player.reward()))
    finally:
        for player in players:
            await player.close()
    for expected, found in zip(alone, said, strict=True):
        if expected != found:
            yield f"objects share state (of the class or the module): {_difference(expected, found)}"


async def starts_afresh(lab: Lab) -> AsyncIterator[str]:
    """`reset` of a used object is as that of a new one."""
    for row, seed, calls in lab.scripts("again", 6):
        expected = await lab.transcript(row, seed, calls)
        player = await lab.open(row, seed)
        try:
            await player.play(calls)
            await player.reset(row, seed)
            said = await player.play(calls)
        finally:
            await player.close()
        if said != expected:
            yield f"the second `reset` does not begin anew: {_difference(expected, said)}"


async def survives_failed_calls(lab: Lab) -> AsyncIterator[str]:
    """A call that raised leaves everything as it was."""
    draw = lab.draw("failed")
    wrong = [one for tool in lab.environment.tools for one in misfits(tool, draw)]
    cases = lab.scripts("failed", max(len(wrong), 1))
    for (name, arguments), (row, seed, calls) in zip(wrong, cases, strict=False):
        expected = await lab.transcript(row, seed, calls)
        player = await lab.open(row, seed)
        try:
            if not (await player.call(name, arguments)).startswith("! "):
                continue  # it is taken, and may do something
            said = await player.play(calls)
        finally:
            await player.close()
        if said != expected:
            yield f"a call of `{name}` that raised changed the state: {_difference(expected, said)}"


async def ends(lab: Lab) -> AsyncIterator[str]:
    """Calls after `done` are refused or harmless."""
    seen = False
    for row, seed, calls in lab.scripts("ends", 40):
        player = await lab.open(row, seed)
        try:
            before = (await player.play(calls))[-1]
            if not player.done:
                continue
            seen = True
            for name, arguments in calls:
                await player.call(name, arguments)
            after = repr(await player.reward())
        finally:
            await player.close()
        if after != before:
            yield f"calls after `done` changed the score from {before} to {after}"
    if not seen:
        raise LeftOut("no episode of random calls was `done`")


async def ignores_the_world(lab: Lab) -> AsyncIterator[str]:
    """No result depends on the clock, the process or a generator that all share."""
    for row, seed, calls in lab.scripts("world", 6):
        expected = await lab.transcript(row, seed, calls)
        with _another_world():
            said = await lab.transcript(row, seed, calls)
        if said != expected:
            yield (
                "results depend on the clock, the process id, the environment or the global random generator: "
                f"{_difference(expected, said)}"
            )


async def cleans_up(lab: Lab) -> AsyncIterator[str]:
    """`close` frees processes, descriptors and threads, also after errors, and may be called twice."""
    await _episode(lab, fails=False)
    await _settled()
    before = _resources()
    for at in range(20):
        await _episode(lab, fails=at % 2 == 1)
    await _settled()
    after = _resources()
    for name, count in before.items():
        if after[name] > count + 2:
            yield f"20 episodes leave {after[name] - count} more {name} behind; free them in `close`"
    player = await lab.open(lab.rows[0])
    close = getattr(player.object, "close", None)
    await player.close()
    if callable(close):
        try:
            made = close()
            await made if inspect.isawaitable(made) else None
        except Exception as error:
            yield f"`close` cannot be called twice: {type(error).__name__}: {error}"


async def leaves_no_trace(lab: Lab) -> AsyncIterator[str]:
    """Tools that are named `stateless` say the same on a new object, and nothing else changes without them."""
    stateless = lab.environment.stateless
    if not stateless:
        raise LeftOut("the class names no tools in `stateless`")
    for row, seed, calls in lab.scripts("stateless", 12):
        player = await lab.open(row, seed)
        others, said = [], [player.observation]
        try:
            for name, arguments in calls:
                result = await player.call(name, arguments)
                if name not in stateless:
                    others.append((name, arguments))
                    said.append(result)
                elif (alone := await _alone(lab, row, seed, (name, arguments))) != result:
                    yield f"`{name}` says {alone[:SHOWN]!r} on a new object, and {result[:SHOWN]!r} later"
                elif player.done:
                    yield f"`{name}` ends the episode, which is a state"
                if player.done:
                    break
            said.append(repr(await player.reward()))
        finally:
            await player.close()
        expected = await lab.transcript(row, seed, others)
        if said != expected:
            yield f"without {sorted(stateless)} the other calls or the score differ: {_difference(expected, said)}"


async def _alone(lab: Lab, row: Mapping[str, Any], seed: int, call: Call) -> str:
    """What a new object says to one call."""
    player = await lab.open(row, seed)
    try:
        return await player.call(*call)
    finally:
        await player.close()


async def _episode(lab: Lab, *, fails: bool) -> None:
    row, seed, calls = lab.scripts("clean", 1)[0]
    player = await lab.open(row, seed)
    try:
        if fails:
            for tool in lab.environment.tools:
                for name, arguments in misfits(tool, lab.draw("clean")):
                    await player.call(name, arguments)
        else:
            await player.play(calls)
    finally:
        await player.close()


async def _settled() -> None:
    """Waits for threads that were told to end."""
    await asyncio.sleep(0.05)


def _resources() -> dict[str, int]:
    import threading

    found = {"threads": threading.active_count()}
    if sys.platform == "linux":
        found["open files"] = len(os.listdir("/proc/self/fd"))
        tasks = Path("/proc/self/task")
        children = [(task / "children").read_text().split() for task in tasks.iterdir()]
        found["processes"] = sum(map(len, children))
    return found


@contextmanager
def _another_world() -> Iterator[None]:
    """Another day, process id and state of the global generators."""
    import numpy as np

    states = random.getstate(), np.random.get_state()
    random.seed(991)
    np.random.seed(991)
    later = time.time() + 864_000.0
    patches: Sequence[Any] = (
        mock.patch("time.time", return_value=later),
        mock.patch("time.time_ns", return_value=int(later * 1e9)),
        mock.patch("os.getpid", return_value=4_000_001),
        mock.patch.dict(os.environ, {"RANK": "3", "HOSTNAME": "another"}),
    )
    try:
        for patch in patches:
            patch.start()
        yield
    finally:
        for patch in reversed(patches):
            patch.stop()
        random.setstate(states[0])
        np.random.set_state(states[1])


def _difference(expected: Sequence[str], found: Sequence[str]) -> str:
    """The first place at which two transcripts differ."""
    for at in range(max(len(expected), len(found))):
        one, other = (said[at] if at < len(said) else "nothing" for said in (expected, found))
        if one != other:
            where = "the observation" if at == 0 else f"result {at}"
            return f"{where} was {one[:SHOWN]!r}, then {other[:SHOWN]!r}"
    return "they are equal"


async def scores_of(lab: Lab, play: Callable[[Player, int], Any], count: int) -> list[float]:
    """Scores of episodes that are played in some way."""
    found = []
    for at in range(count):
        row = lab.rows[at % len(lab.rows)]
        player = await lab.open(row, at)
        try:
            await play(player, at)
            score = score_of(await player.reward())
        finally:
            await player.close()
        if score is not None:
            found.append(score)
    return found
