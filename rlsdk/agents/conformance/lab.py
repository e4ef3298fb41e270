"""Objects of an environment under test, and transcripts of what they say."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from rlsdk.agents.conformance.drawing import Call, script
from rlsdk.agents.environments.tools import EnvironmentClass, text_of_result
from rlsdk.agents.environments.worker import Worker

RESET = "reset"


@dataclass(frozen=True, kw_only=True)
class Lab:
    """An environment under test."""

    environment: EnvironmentClass
    rows: Sequence[Mapping[str, Any]]
    """Of its data, at least one."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of its class."""
    call_s: float = 2.0
    """Seconds that a call may take."""
    max_tool_chars: int = 16_000
    seed: int = 0

    def draw(self, what: str) -> Random:
        """A random generator of its own for each purpose."""
        return Random(f"{self.seed}/{what}")

    def scripts(self, what: str, count: int) -> list[tuple[Mapping[str, Any], int, list[Call]]]:
        """Rows, seeds and scripts of calls."""
        draw = self.draw(what)
        tools = self.environment.tools
        return [(self.rows[at % len(self.rows)], draw.randint(0, 2**31), script(tools, draw)) for at in range(count)]

    async def open(self, row: Mapping[str, Any], seed: int = 0) -> Player:
        """A new object that was reset."""
        player = Player(self)
        try:
            await player.reset(row, seed)
        except BaseException:
            await player.close()
            raise
        return player

    async def transcript(self, row: Mapping[str, Any], seed: int, calls: Sequence[Call]) -> list[str]:
        """What a new object says: its observation, a result for each call, its score."""
        player = await self.open(row, seed)
        try:
            return await player.play(calls)
        finally:
            await player.close()


class Player:
    """One object."""

    def __init__(self, lab: Lab) -> None:
        self._lab, self._worker, self.object = lab, Worker(), None
        self.observation = ""
        self.closed = False

    async def reset(self, row: Mapping[str, Any], seed: int) -> None:
        """Makes the object if there is none yet, and resets it."""
        arguments = self._lab.environment.arguments(row, seed)
        if self.object is None:
            self.object = await self._call(self._lab.environment.make, **self._lab.options)
        self.observation = str(await self._call(getattr(self.object, RESET), **arguments))

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The result of a call as text; of one that raised, its error.

        Raises:
            TimeoutError: it did not answer in time.
        """
        try:
            return "= " + text_of_result(await self._call(getattr(self.object, name), **arguments))
        except TimeoutError:
            raise
        except Exception as error:
            return f"! {type(error).__name__}: {error}"

    async def play(self, calls: Sequence[Call]) -> list[str]:
        """The transcript from here on, until the episode ends."""
        said = [self.observation]
        for name, arguments in calls:
            if self.done:
                break
            said.append(await self.call(name, arguments))
        return [*said, repr(await self.reward())]

    @property
    def done(self) -> bool:
        return getattr(self.object, "done", False) is True

    @property
    def is_scored(self) -> bool:
        return callable(getattr(self.object, "get_reward", None))

    async def reward(self) -> Any:
        """What `get_reward` returns; None: there is none."""
        return await self._call(self.object.get_reward) if self.is_scored and self.object is not None else None

    async def close(self) -> None:
        """Closes the object."""
        close = getattr(self.object, "close", None)
        try:
            if callable(close) and not self.closed:
                self.closed = True
                await self._call(close)
        finally:
            self._worker.close()

    async def _call(self, function: Any, **arguments: Any) -> Any:
        return await self._worker.call(function, timeout_s=self._lab.call_s, **arguments)


def score_of(reward: Any) -> float | None:
    """The sum of a score's parts; None: not scored."""
    if isinstance(reward, Mapping):
        return float(sum(float(part) for part in reward.values()))
    return None if reward is None else float(reward)


async def lag_of(work: Any) -> float:
    """Seconds by which the event loop was late while something ran."""
    loop, worst = asyncio.get_running_loop(), 0.0
    running = asyncio.ensure_future(work)
    while not running.done():
        begin = loop.time()
        await asyncio.sleep(0.01)
        worst = max(worst, loop.time() - begin - 0.01)
    await asyncio.gather(running, return_exceptions=True)
    return worst


def is_async(lab: Lab) -> bool:
    """Whether a tool or hook runs on the event loop."""
    names = [tool["function"]["name"] for tool in lab.environment.tools]
    return any(inspect.iscoroutinefunction(getattr(lab.environment.make, name, None)) for name in (*names, RESET))
