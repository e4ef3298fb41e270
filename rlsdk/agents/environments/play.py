"""The loop that plays an environment: the model speaks, its tools are called, until the episode ends."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

import numpy as np

from rlsdk.agents.chats.chat_format import message_of
from rlsdk.agents.environments.calling import KnownResults, ToolCalls, is_done
from rlsdk.agents.environments.limits import Limits
from rlsdk.agents.environments.tools import EnvironmentClass
from rlsdk.agents.environments.worker import Worker
from rlsdk.interfaces import (
    AssistantMessage,
    BatchError,
    DataError,
    Ended,
    Episode,
    FinishReason,
    Generate,
    Message,
    PromptView,
    Receipt,
    Span,
    ToolFormat,
    Trajectory,
    Turn,
    joined_ids,
)

OWN_PARTS = "reward"
"""Before the names of a reward's parts, among the numbers of an episode."""


class EnvironmentFailedError(BatchError):
    """The environment failed outside of a tool, which fails the sample."""

    kind = "environment"
    """Kind of the failure in metrics."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentRollouter:
    """Satisfies `Rollouter`: plays a new object of a class for every sample."""

    environment: EnvironmentClass
    form: ToolFormat
    limits: Limits = field(default_factory=Limits)

    async def __call__(self, prompt: PromptView, generate: Generate, **options: Any) -> Episode:
        """Plays one episode; `options` are given to the class."""
        game = _Game(self.environment, self.form, self.limits, prompt, generate)
        try:
            return await game.play(options)
        finally:
            await game.close()


class _Game:
    """One episode."""

    def __init__(
        self, environment: EnvironmentClass, form: ToolFormat, limits: Limits, prompt: PromptView, generate: Generate
    ) -> None:
        self._class, self._form, self._limits = environment, form, limits
        self._prompt, self._generate = prompt, generate
        self._worker = Worker()
        self._object: Any = None
        self._messages: list[Message] = []
        self._rows: list[_Row] = []
        # Of a run; a test's policy has none.
        known: KnownResults | None = getattr(generate, "tools", None)
        self._calls = ToolCalls(environment, limits, self._worker, known)
        self._num_turns = 0
        self._sampled = 0
        self._rendered_again = 0
        """Turns whose history began a new row."""

    async def play(self, options: Mapping[str, Any]) -> Episode:
        await self._begin(options)
        try:
            async with asyncio.timeout(self._limits.agent_s):
                ended = await self._turns()
        except TimeoutError:
            ended = Ended.TIME
        if not any(row.spans[1:] for row in self._rows):
            raise EnvironmentFailedError(f"the episode ended ({ended}) before the model's first turn was sampled")
        reward, parts = await self._reward()
        return self._episode(ended, reward, parts)

    async def close(self) -> None:
        """Ends the object, whatever became of the episode."""
        close = getattr(self._object, "close", None)
        try:
            if callable(close):
                await self._worker.call(close, timeout_s=self._limits.finalize_s)
        except Exception:
            pass
        finally:
            self._worker.close()

    async def _begin(self, options: Mapping[str, Any]) -> None:
        limit = self._limits.setup_s
        async with _named("reset", limit, self._class.name):
            arguments = self._class.arguments(self._prompt.row, self._generate.seed)
            self._object = await self._worker.call(self._class.make, timeout_s=limit, **options)
            seen = await self._worker.call(self._object.reset, timeout_s=limit, **arguments)
            self._messages = with_observation(self._prompt.messages, seen)
            self._new_row()

    def _new_row(self) -> None:
        ids = self._form.prompt(self._messages, self._class.tools)
        self._rows.append(_Row([Span.given(ids)]))

    async def _turns(self) -> Ended:
        """Plays until something ends the episode."""
        for _ in range(self._limits.max_turns):
            if not (room := self._room()):
                return Ended.CONTEXT if self._row_room() < 1 else Ended.TOKENS
            ids = joined_ids(self._rows[-1].spans)
            turn = await self._generate(ids, max_tokens=min(room, self._generate.sampling.max_tokens))
            self._take(turn)
            if turn.finish_reason is FinishReason.LENGTH:
                return Ended.CONTEXT if self._row_room() < 1 else Ended.TOKENS
            said = self._form.read(turn.span.token_ids.tolist(), ids, self._class.tools)
            said = self._numbered(said)
            results = await self._calls.answers(self._object, said, self._num_turns - 1)
            await self._turn_reward()
            if is_done(self._object) or not results:
                return Ended.AGENT
            if self._calls.failures_in_a_row >= self._limits.max_tool_failures:
                return Ended.TOOL_ERROR
            self._continue(said, results)
        return Ended.TURNS

    def _take(self, turn: Turn) -> None:
        self._rows[-1].take(turn)
        self._sampled += len(turn.span)
        self._num_turns += 1

    def _row_room(self) -> int:
        """Tokens that the last row has room for."""
        return self._generate.max_model_tokens - sum(len(span) for span in self._rows[-1].spans)

    def _room(self) -> int:
        """Tokens that may still be sampled in the last row."""
        most = self._limits.max_episode_tokens
        left = self._row_room() if most is None else min(self._row_room(), most - self._sampled)
        return max(left, 0)

    def _numbered(self, said: AssistantMessage) -> AssistantMessage:
        """The turn with an identity for each call: formats of models mostly have none."""
        first = self._calls.counts["tool_calls"]
        calls = [replace(call, id=call.id or f"call_{first + at}") for at, call in enumerate(said.calls)]
        return replace(said, calls=tuple(calls))

    async def _turn_reward(self) -> None:
        method = getattr(self._object, "turn_reward", None)
        if callable(method):
            async with _named("turn_reward", self._limits.tool_s, self._class.name):
                value = _number(await self._worker.call(method, timeout_s=self._limits.tool_s), "turn_reward")
            self._rows[-1].rewards[len(self._rows[-1].spans) - 1] = value

    def _continue(self, said: AssistantMessage, results: Sequence[Message]) -> None:
        """Adds the results: behind the ids that were sampled, or in a new row if the template rewrites the past."""
        before = [*self._messages, message_of(said)]
        more = self._form.extend(joined_ids(self._rows[-1].spans), before, results, self._class.tools)
        self._messages = [*before, *results]
        if more is None:
            self._rendered_again += 1
            try:
                self._new_row()
            except DataError as error:
                raise EnvironmentFailedError(f"environment {self._class.name!r}: {error}") from error
        else:
            self._rows[-1].spans.append(Span.given(more))

    async def _reward(self) -> tuple[float | None, Mapping[str, float]]:
        method = getattr(self._object, "get_reward", None)
        if not callable(method):
            return None, {}
        async with _named("get_reward", self._limits.finalize_s, self._class.name):
            found = await self._worker.call(method, timeout_s=self._limits.finalize_s)
            if found is None:
                return None, {}
            if isinstance(found, Mapping):
                parts = {str(name): _number(value, f"get_reward[{name!r}]") for name, value in found.items()}
                return math.fsum(parts.values()), parts
            return _number(found, "get_reward"), {}

    def _episode(self, ended: Ended, reward: float | None, parts: Mapping[str, float]) -> Episode:
        rows = [row for row in self._rows if len(row.spans) > 1]
        info = {name: float(count) for name, count in {"turns": self._num_turns, **self._calls.counts}.items()}
        info |= {"rows": float(len(rows))} | {f"ended_{one.value}": float(one is ended) for one in Ended}
        info |= {f"{OWN_PARTS}/{name}": value for name, value in parts.items()}
        scored = any(row.rewards for row in rows)
        trajectories = tuple(row.trajectory() for row in rows)
        return Episode(
            rows=trajectories,
            ended=ended,
            receipt=Receipt(
                sampled=self._sampled,
                trained=sum(row.num_sampled for row in trajectories),
                rendered_again={"template": self._rendered_again} if self._rendered_again else {},
                digests=tuple(row.digest for row in trajectories),
            ),
            tools=tuple(self._calls.uses),
            info=info,
            reward=reward,
            token_rewards=np.concatenate([row.token_rewards() for row in rows]) if scored else None,
        )


class _Row:
    """A row that is being made."""

    def __init__(self, spans: list[Span]) -> None:
        self.spans = spans
        self.reason = FinishReason.STOP
        self.rewards: dict[int, float] = {}
        """Number of a sampled span -> reward of its last token."""

    def take(self, turn: Turn) -> None:
        self.spans.append(turn.span)
        self.reason = turn.finish_reason

    def trajectory(self) -> Trajectory:
        return Trajectory(spans=tuple(self._seen), finish_reason=self.reason)

    @property
    def _seen(self) -> list[Span]:
        """Without results that no turn came after."""
        return self.spans if self.spans[-1].sampled else self.spans[:-1]

    def token_rewards(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """`[tokens after the prompt]`."""
        parts = [np.zeros(len(span)) for span in self._seen[1:]]
        for at, value in self.rewards.items():
            if len(parts[at - 1]):
                parts[at - 1][-1] = value
        return np.concatenate([np.zeros(0), *parts])


class _named:  # noqa: N801 -- reads as a function
    """Names the hook whose failure costs the sample."""

    def __init__(self, hook: str, limit_s: float, environment: str) -> None:
        self._what, self._limit_s = f"environment {environment!r}: {hook}", limit_s

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, TimeoutError):
            raise EnvironmentFailedError(f"{self._what} did not return within {self._limit_s:g} s") from error
        if isinstance(error, Exception) and not isinstance(error, EnvironmentFailedError):
            raise EnvironmentFailedError(f"{self._what} failed: {type(error).__name__}: {error}") from error


def with_observation(prompt: Sequence[Message], seen: Any) -> list[Message]:
    """The chat that begins an episode: the row's prompt, and what `reset` returned. Text goes behind that of the last
    user message, because many chat templates refuse two of them in a row.

    Raises:
        TypeError: it returned something else.
    """
    if seen is None or (isinstance(seen, str) and not seen):
        return [*prompt]
    if isinstance(seen, str):
        last = prompt[-1] if prompt else {}
        said = last.get("content")
        if last.get("role") == "user" and isinstance(said, str):
            return [*prompt[:-1], {**last, "content": f"{said}\n{seen}" if said else seen}]
        return [*prompt, {"role": "user", "content": seen}]
    if isinstance(seen, Sequence) and all(isinstance(one, Mapping) and "role" in one for one in seen):
        return [*prompt, *(dict(one) for one in seen)]
    raise TypeError(f"reset returned {type(seen).__name__}; expected text, a list of messages, or None")


def _number(value: Any, what: str) -> float:
    if isinstance(value, bool | Real | np.number) and math.isfinite(float(value)):
        return float(value)
    raise ValueError(f"{what} is {value!r}; expected a finite number")
