"""The default rollouter, and the `generate` function that every rollouter gets."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rlsdk.interfaces import (
    BatchError,
    ConfigError,
    Generate,
    GenerationOutput,
    GenerationRequest,
    PromptView,
    Span,
    ToolUse,
    Trajectory,
    Turn,
)
from rlsdk.rollouts.client.client import GenerationClient
from rlsdk.rollouts.client.flights import Waiter
from rlsdk.rollouts.groups.begun import Begun, ToolResults
from rlsdk.rollouts.groups.group import GroupTask
from rlsdk.rollouts.groups.receipts import TurnAccount
from rlsdk.rollouts.schedule.seeds import request_seed

Tokens = Sequence[int] | NDArray[np.int64]


class TextCodec(Protocol):
    """Converts between token ids and text."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Tokens) -> str: ...


async def single_turn(prompt: PromptView, generate: Generate, **options: Any) -> Trajectory:
    """One response to each prompt."""
    if options:
        raise ConfigError(f"rollout.rollouter_options {sorted(options)}: the single-turn rollouter has none")
    turn = await generate(prompt.prompt_ids)
    return Trajectory(spans=(Span.given(prompt.prompt_ids), turn.span), finish_reason=turn.finish_reason)


@dataclass(eq=False)
class GroupRequests:
    """The requests of one group: equal calls of its samples in one turn of the loop become one request, so that the
    engine runs their prompt once."""

    task: GroupTask
    client: GenerationClient
    codec: TextCodec
    max_model_tokens: int
    name: str = ""
    """Distinguishes it from other requests of the same group."""
    begun: Mapping[int, Begun] = field(default_factory=dict)
    """What samples have already, by index: it is not made again."""
    record: Callable[[int, str, Turn], None] | None = None
    """Called with sample, key and turn, as soon as a turn was sampled."""
    record_tool: Callable[[int, int, ToolUse], None] | None = None
    """Called with sample, number of the call and its result, as soon as a tool without state ran to its end."""

    def __post_init__(self) -> None:
        self._calls: list[Call] = []
        self._count = 0

    def of_sample(self, index: int) -> SampleGenerate:
        """The context that the rollouter of one sample gets."""
        return SampleGenerate(self, index)

    def whole(self, samples: Mapping[int, Waiter]) -> None:
        """One joint request for the first turn of all samples; each waits for its own by index. Equivalent to one call
        per sample. The prompt must leave room for a token."""
        wanted = min(self.task.sampling.max_tokens, self.max_model_tokens - len(self.task.prompt.prompt_ids))
        request = self._request((0,), 0, self.task.num_samples, self.task.prompt.prompt_ids, wanted)
        self.client.deliver(request, samples, priority=self.task.ordinal)

    async def generate(self, call: Call) -> GenerationOutput:
        if not self._calls:
            asyncio.get_running_loop().call_soon(self._flush)
        self._calls.append(call)
        return await call.output

    def _flush(self) -> None:
        """One request for each run of adjacent samples whose calls are equal."""
        calls, self._calls = self._calls, []
        calls.sort(key=lambda call: (call.place, call.sample))
        runs: list[list[Call]] = []
        for call in calls:
            if runs and call.continues(runs[-1][-1]):
                runs[-1].append(call)
            else:
                runs.append([call])
        for run in runs:
            self._send(run)

    def _send(self, run: Sequence[Call]) -> None:
        first = run[0]
        request = self._request(
            first.place, first.sample, len(run), first.token_ids, first.max_tokens, first.stop_strings
        )
        futures = self.client.generate(request, priority=self.task.ordinal)
        for call in run:
            _forward(futures, call)

    def _request(
        self,
        place: tuple[int | str, ...],
        first_sample: int,
        n: int,
        token_ids: tuple[int, ...],
        max_tokens: int,
        stop_strings: tuple[str, ...] = (),
    ) -> GenerationRequest:
        self._count += 1
        # The first turn's seed is the group's own; sample i of a request draws from (seed, i) by the engine's contract.
        seed = self.task.seed if place == (0,) else (*self.task.seed, "turn", *place)
        sampling = self.task.sampling
        if stop_strings:
            sampling = replace(sampling, stop_strings=tuple(dict.fromkeys((*sampling.stop_strings, *stop_strings))))
        return GenerationRequest(
            request_id=f"{self.task.id}#{self.name}{self._count}",
            prompt_ids=token_ids,
            sampling=replace(sampling, max_tokens=max_tokens, seed=request_seed(*seed)),
            n=n,
            first_sample=first_sample,
            adapter_version=self.task.adapter_version,
        )


@dataclass(eq=False)
class Call:
    """One call of `generate`."""

    sample: int
    place: tuple[int | str, ...]
    token_ids: tuple[int, ...]
    max_tokens: int
    stop_strings: tuple[str, ...]
    output: asyncio.Future[GenerationOutput]

    @property
    def key(self) -> str:
        """Equal for calls of a sample whose turns are equal: the same draw, after the same ids, within the same
        limits."""
        digest = hashlib.blake2b(repr((self.place, self.max_tokens, self.stop_strings)).encode(), digest_size=12)
        digest.update(np.asarray(self.token_ids, np.int64).tobytes())
        return digest.hexdigest()

    def continues(self, other: Call) -> bool:
        """Whether both calls fit into one request, this one directly after the other."""
        return (self.place, self.sample, self.max_tokens, self.token_ids, self.stop_strings) == (
            other.place, other.sample + 1, other.max_tokens, other.token_ids, other.stop_strings,
        )  # fmt: skip


def _forward(futures: Mapping[int, asyncio.Future[GenerationOutput]], call: Call) -> None:
    """Delivers a sample, or its error, to the call that waits for it."""

    def done(future: asyncio.Future[GenerationOutput]) -> None:
        if call.output.done():
            return
        if future.cancelled():
            call.output.cancel()
        elif (error := future.exception()) is not None:
            call.output.set_exception(error)
        else:
            call.output.set_result(future.result())

    futures[call.sample].add_done_callback(done)


class SampleGenerate:
    """Satisfies `rlsdk.interfaces.Generate` for one sample of a group."""

    def __init__(self, requests: GroupRequests, sample: int) -> None:
        self._requests = requests
        self._sample = sample
        self._turn = 0
        self.sampling = requests.task.sampling
        self.max_model_tokens = requests.max_model_tokens
        self.seed = request_seed(*requests.task.seed, "task")
        self.account = TurnAccount()
        begun = requests.begun.get(sample, Begun())
        self._made = begun.turns
        record = requests.record_tool
        self.tools = ToolResults(begun=begun.tools, record=None if record is None else partial(record, sample))
        self._turns: dict[str, Turn] = {}
        """Key of a call -> its turn. An agent that is run again gets the turns that it had."""

    async def __call__(
        self,
        token_ids: Sequence[int],
        *,
        max_tokens: int | None = None,
        stop_strings: Sequence[str] = (),
        place: Sequence[int | str] | None = None,
    ) -> Turn:
        """See `Generate`.

        Args:
            token_ids: everything so far.
            max_tokens: maximum number of new tokens.
            stop_strings: strings that end this turn, in addition to the run's.
            place: names the random draw within the sample, for calls that may come in any order; None: the number of
                calls before it, which is also the place of that one number.

        Raises:
            BatchError: there is no room for another token; the sample fails.
        """
        room = self.max_model_tokens - len(token_ids)
        if not token_ids or room < 1:
            raise BatchError(
                f"generate was called with {len(token_ids)} tokens; expected 1 to {self.max_model_tokens - 1}, fewer "
                "than rollout.max_model_tokens"
            )
        wanted = self.sampling.max_tokens if max_tokens is None else max_tokens
        call = Call(
            sample=self._sample,
            place=(self._turn,) if place is None else tuple(place),
            token_ids=tuple(token_ids),
            max_tokens=min(wanted, room),
            stop_strings=tuple(stop_strings),
            output=asyncio.get_running_loop().create_future(),
        )
        self._turn += 1
        key = call.key
        if key not in self._turns:
            turn = self._made.get(key) or await self._sampled(key, call)
            self.account.add(turn.span)
            self._turns[key] = turn
        return self._turns[key]

    @property
    def num_unasked(self) -> int:
        """Tokens of turns that exist already and were not asked for."""
        return sum(len(turn.span) for key, turn in self._made.items() if key not in self._turns)

    async def _sampled(self, key: str, call: Call) -> Turn:
        output = await self._requests.generate(call)
        turn = Turn(span=Span.of(output), finish_reason=output.finish_reason)
        if self._requests.record is not None:
            self._requests.record(self._sample, key, turn)
        return turn

    def text(self, turn: Turn) -> str:
        """See `Generate`."""
        return self.decode(without_stop(turn.span.token_ids, self.sampling.stop_token_ids))

    def encode(self, text: str) -> list[int]:
        """See `Generate`."""
        return self._requests.codec.encode(text)

    def decode(self, token_ids: Tokens) -> str:
        """See `Generate`."""
        return self._requests.codec.decode(token_ids)


def without_stop(token_ids: Tokens, stop_token_ids: Sequence[int]) -> Tokens:
    """A response without the token that ended it."""
    return token_ids[:-1] if len(token_ids) and token_ids[-1] in stop_token_ids else token_ids
