"""One agent's session: requests in, answers out, every sampled token kept. No server, no clock, no order of arrival."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from rlsdk.agents.chats.chat_format import message_of
from rlsdk.agents.sessions.history import chain, extended, text_of
from rlsdk.agents.sessions.limits import EpisodeLimits
from rlsdk.agents.sessions.requests import Answer, Ask, Choice, Refusal
from rlsdk.agents.sessions.row_tree import Ids, RowTree, TurnNode
from rlsdk.interfaces import (
    AssistantMessage,
    BatchError,
    DataError,
    Ended,
    FinishReason,
    Message,
    ToolCall,
    ToolFormat,
    ToolUse,
    Turn,
)

Place = tuple[int | str, ...]
"""Names the random draw of a call within its sample."""


class ChatForm(ToolFormat, Protocol):
    """What a session needs of a model's format."""

    @property
    def reads_calls(self) -> bool: ...

    def texts_with_control(self, messages: Sequence[Message]) -> int: ...


class Sampler(Protocol):
    """Samples for one session."""

    @property
    def max_model_tokens(self) -> int: ...

    @property
    def max_tokens(self) -> int:
        """Limit of one call."""
        ...

    @property
    def supports_stop(self) -> bool:
        """Whether `stop` may have texts."""
        ...

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Text that each token adds."""
        ...

    async def sample(self, ids: Sequence[int], *, max_tokens: int, stop: tuple[str, ...], place: Place) -> Turn: ...


@dataclass(eq=False, slots=True)
class _Asked:
    """A request that is being answered or was: what a retry needs. All that a session holds is visited by each whole
    garbage collection, which stops the gateway; so an answer is not kept, but read again from its turns."""

    answering: asyncio.Future[Answer] | None = None
    """None: it was answered."""
    nodes: tuple[TurnNode, ...] = ()
    answer_id: str = ""
    is_lost: bool = False

    def lose(self, is_lost: bool) -> None:
        self.is_lost = is_lost
        for node in self.nodes:
            node.is_delivered = not is_lost


@dataclass(frozen=True)
class Pending:
    """A request that waits for its answer."""

    answer: asyncio.Future[Answer]
    """Raises the `Refusal`, or is cancelled when the session is closed. Not to be cancelled by those who wait."""
    asked: _Asked

    def lose(self) -> None:
        """Says that no client waits for the answer, and none has got it."""
        self.asked.lose(True)


class Session:
    """Answers the requests of one agent, and keeps what was sampled."""

    def __init__(self, form: ChatForm, sampler: Sampler, limits: EpisodeLimits) -> None:
        self.tree = RowTree()
        self.counts: Counter[str] = Counter()
        """`turns`, `calls`, `malformed`, `continued`, `neutralised`, `delivered_again`, `overridden`, `refused`."""
        self.rendered_again: Counter[str] = Counter()
        """Reason -> prompts that begin a new row although turns came before."""
        self.ended: Ended | None = None
        """The first limit that was reached."""
        self.error: BaseException | None = None
        """The first error that was no refusal."""
        self.overlapped = False
        """Whether calls were sampled at the same time."""
        self._form, self._sampler, self._limits = form, sampler, limits
        self.tools: list[ToolUse] = []
        """Calls of tools whose results came with later requests."""
        self._open_calls: dict[str, tuple[int, ToolCall]] = {}
        """Id of a call without a result -> number of its answer, and the call."""
        self._known: dict[bytes, _Asked] = {}
        """Digest of a request -> the latest one that had it."""
        self._turns: dict[bytes, TurnNode] = {}
        """Key of a history -> the turn that ends it."""
        self._drawn: Counter[Place] = Counter()
        self._running: set[asyncio.Task[Any]] = set()
        self._begun = 0
        self._openings: set[bytes] = set()
        """Keys of the first message of every request."""
        self._longest = 0
        """Messages of the longest history."""

    def request(self, ask: Ask, digest: bytes, *, is_retry: bool) -> Pending:
        """Begins to answer a request; one that was sent again gets the answer that it lost.

        Args:
            ask: the request.
            digest: of the whole request as it came: a repeated one has the same.
            is_retry: the client says that it repeats a request.
        """
        known = self._known.get(digest)
        if known is None or not (is_retry or known.is_lost):
            return self._begin(ask, digest)
        self.counts["delivered_again"] += 1
        known.lose(False)
        if known.answering is not None:
            return Pending(known.answering, known)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        answer.set_result(self._read(ask, known))
        return Pending(answer, known)

    async def close(self) -> None:
        """Ends calls that are being sampled; nothing is answered afterwards."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _begin(self, ask: Ask, digest: bytes) -> Pending:
        call, self._begun = self._begun, self._begun + 1
        self._known[digest] = asked = _Asked()
        # A task of its own: it goes on when the client has left, who asks again.
        asked.answering = task = asyncio.get_running_loop().create_task(self._answered(ask, call, asked))
        self.overlapped |= bool(self._running)
        self._running.add(task)

        def done(task: asyncio.Task[Answer]) -> None:
            self._running.discard(task)
            asked.answering = None
            if asked.is_lost:
                asked.lose(True)
            if task.cancelled() or task.exception() is not None:
                if self._known.get(digest) is asked:
                    del self._known[digest]
                self._failed(None if task.cancelled() else task.exception())

        task.add_done_callback(done)
        return Pending(task, asked)

    def _failed(self, error: BaseException | None) -> None:
        if isinstance(error, Refusal):
            self.counts["refused"] += 1
            self.ended = self.ended or error.ended
        elif error is not None:
            self.error = self.error or error

    async def _answered(self, ask: Ask, call: int, asked: _Asked) -> Answer:
        self._check_request(ask)
        ids, keys = self._prompt(ask)
        self._check_limits(ids, ask.num_choices)
        self._count(ask)
        self._note_results(ask.messages)
        prompt = np.asarray(ids, np.int32)  # once: a list of 30,000 tokens takes a millisecond
        digest = hashlib.blake2b(prompt.astype(np.int64).tobytes(), digest_size=16).hexdigest()
        places = [self._place(prompt, digest) for _ in range(ask.num_choices)]
        turns = await self._sample(ask, ids, places)
        asked.nodes = tuple(self._keep(ask, prompt, turn, call) for turn in turns)
        asked.answer_id = hashlib.blake2b(f"{digest}/{places[0]}".encode(), digest_size=12).hexdigest()
        answer = self._read(ask, asked)
        for node, choice in zip(asked.nodes, answer.choices, strict=True):
            message = message_of(choice.message)
            node.message = json.dumps(message)
            self._turns[extended(keys[-1], message)] = node
            self._longest = max(self._longest, len(ask.messages) + 1)
            self.counts["calls"] += len(choice.message.calls)
            self.counts["malformed"] += choice.message.malformed is not None
            self._open_calls |= {one.id: (call, one) for one in choice.message.calls}
        return answer

    def _read(self, ask: Ask, asked: _Asked) -> Answer:
        """The answer that its turns are."""
        node = asked.nodes[0]
        ids = node.ids()[: -len(node.span) or None]
        choices = [self._choice(ask, ids, one, f"{asked.answer_id}{at:02d}") for at, one in enumerate(asked.nodes)]
        return Answer(id=asked.answer_id, choices=tuple(choices), prompt_tokens=len(ids))

    def _count(self, ask: Ask) -> None:
        self.counts["turns"] += ask.num_choices
        self.counts["overridden"] += len(ask.overridden)
        self.counts["neutralised"] += self._form.texts_with_control(ask.messages)

    def _note_results(self, messages: Sequence[Message]) -> None:
        for message in messages:
            found = self._open_calls.pop(str(message.get("tool_call_id")), None)
            if found is not None:
                turn, call = found
                result = text_of(message.get("content"))
                self.tools.append(ToolUse(turn=turn, name=call.name, arguments=call.arguments, result=result))

    def _prompt(self, ask: Ask) -> tuple[list[int], list[bytes]]:
        """Ids of a request's prompt: those of the longest known history, and what follows it; or all of it anew."""
        keys = chain(ask.tools, ask.messages)
        try:
            ids = self._continued(ask, keys) or self._form.prompt(ask.messages, ask.tools)
        except DataError as error:
            raise Refusal(str(error), code="invalid_messages", param="messages") from error
        self._openings.add(keys[1])
        return ids, keys

    def _continued(self, ask: Ask, keys: Sequence[bytes]) -> list[int] | None:
        """Ids of a prompt whose beginning is known; None: it begins a row."""
        for known in range(len(ask.messages), 0, -1):
            if keys[known] not in self._turns:
                continue
            node = self._turns[keys[known]]
            before, turn = node.ids(), json.loads(node.message)
            new = self._form.extend(before, [*ask.messages[: known - 1], turn], ask.messages[known:], ask.tools)
            if new is not None:
                self.counts["continued"] += 1
                return [*before, *new]
            self.rendered_again["thinking" if "reasoning_content" in turn else "template"] += 1
            return None
        if self.tree.nodes:
            self.rendered_again[self._why_unknown(ask, keys)] += 1
        return None

    def _why_unknown(self, ask: Ask, keys: Sequence[bytes]) -> str:
        if keys[1] not in self._openings:
            return "no_match"
        return "compacted" if len(ask.messages) < self._longest else "edited"

    def _check_request(self, ask: Ask) -> None:
        if ask.tools and not self._form.reads_calls:
            raise Refusal(
                "tools: the model's chat template writes no calls in a way that is known; name one of the formats in "
                "rollout.tool_format",
                code="unsupported_parameter", param="tools",
            )  # fmt: skip
        if ask.stop and not self._sampler.supports_stop:
            raise Refusal(
                "stop: the rollout engine does not stop at texts; leave the field out",
                code="unsupported_parameter", param="stop",
            )  # fmt: skip

    def _check_limits(self, ids: Sequence[int], choices: int) -> None:
        limits, room = self._limits, self._sampler.max_model_tokens
        if len(ids) >= room:
            raise Refusal(
                f"the messages have {len(ids)} tokens, and a row holds at most {room} with its answer "
                "(rollout.max_model_tokens)",
                code="context_length_exceeded", param="messages", ended=Ended.CONTEXT,
            )  # fmt: skip
        if self.counts["turns"] + choices > limits.max_turns:
            raise Refusal(
                f"the episode has had its {limits.max_turns} answers (rollout.max_turns)",
                code="turn_limit", ended=Ended.TURNS,
            )  # fmt: skip
        sampled = sum(len(node.span) for node in self.tree.nodes)
        if limits.max_episode_tokens is not None and sampled >= limits.max_episode_tokens:
            raise Refusal(
                f"{sampled} tokens were sampled for the episode, of {limits.max_episode_tokens} at most "
                "(rollout.max_episode_tokens)",
                code="token_limit", ended=Ended.TOKENS,
            )  # fmt: skip

    def _place(self, prompt: Ids, digest: str) -> Place:
        """The random draw of a call: that of its turn in its row, as rollouters have it; calls that repeat one of equal
        ids have draws of their own. Nothing depends on which of several concurrent calls comes first."""
        parent, _ = self.tree.parent_of(prompt)
        turn = 0 if parent is None else parent.depth + 1
        count = self._drawn[turn, digest]
        self._drawn[turn, digest] += 1
        return (turn, digest, count) if count else (turn,)

    async def _sample(self, ask: Ask, ids: Sequence[int], places: Sequence[Place]) -> list[Turn]:
        wanted = self._sampler.max_tokens if ask.max_tokens is None else min(ask.max_tokens, self._sampler.max_tokens)
        if self._limits.max_episode_tokens is not None:
            sampled = sum(len(node.span) for node in self.tree.nodes)
            wanted = min(wanted, max(1, (self._limits.max_episode_tokens - sampled) // len(places)))
        calls: list[Awaitable[Turn]] = [
            self._sampler.sample(ids, max_tokens=wanted, stop=ask.stop, place=place) for place in places
        ]
        try:
            return list(await asyncio.gather(*calls))
        except BatchError as error:
            raise Refusal(str(error), code="context_length_exceeded", ended=Ended.CONTEXT) from error

    def _keep(self, ask: Ask, prompt: Ids, turn: Turn, call: int) -> TurnNode:
        parent, given = self.tree.parent_of(prompt)
        node = TurnNode(
            parent=parent, given=given, span=turn.span, finish_reason=turn.finish_reason, call=call,
            has_tools=bool(ask.tools),
        )  # fmt: skip
        self.tree.add(node)
        return node

    def _choice(self, ask: Ask, ids: Sequence[int], node: TurnNode, answer_id: str) -> Choice:
        token_ids = node.span.token_ids.tolist()
        message = self._form.read(token_ids, ids, ask.tools if ask.reads_calls else ())
        assert node.span.log_probs is not None
        return Choice(
            message=_with_ids(_without_stop(message, ask.stop), answer_id),
            finish_reason=_finish_reason(message, node.finish_reason),
            token_ids=node.span.token_ids,
            log_probs=node.span.log_probs,
            pieces=tuple(self._sampler.pieces(token_ids)) if ask.wants_log_probs else (),
        )


def _with_ids(message: AssistantMessage, answer_id: str) -> AssistantMessage:
    """The message with an id for each of its calls."""
    calls = tuple(replace(call, id=f"call_{answer_id}{at:02d}") for at, call in enumerate(message.calls))
    return replace(message, calls=calls)


def _without_stop(message: AssistantMessage, stop: Sequence[str]) -> AssistantMessage:
    """The message up to the first text that its request asked to stop at."""
    found = [at for text in stop if (at := message.content.find(text)) >= 0]
    return replace(message, content=message.content[: min(found)]) if found else message


def _finish_reason(message: AssistantMessage, reason: FinishReason) -> str:
    if reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if message.calls else "stop"
