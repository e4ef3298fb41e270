"""A rollouter whose episodes are made by an agent that speaks to the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, cast

from rlsdk.agents.gateway.app import MODEL
from rlsdk.agents.gateway.loop_thread import LoopThread
from rlsdk.agents.gateway.server import Gateway
from rlsdk.agents.gateway.sessions import OpenSession
from rlsdk.agents.programs.command import AgentKilledError
from rlsdk.agents.sessions.limits import EpisodeLimits
from rlsdk.agents.sessions.rows import info_of, rows_of
from rlsdk.agents.sessions.session import ChatForm, Place, Session
from rlsdk.interfaces import AgentSession, BatchError, Ended, Episode, Generate, Outcome, PromptView, Turn


class AgentFailedError(BatchError):
    """The agent failed, which fails the sample."""

    kind = "agent"
    """Kind of the failure in metrics."""


class NoCallsError(AgentFailedError):
    """The agent got no answer of the policy."""

    kind = "no_calls"


class Program(Protocol):
    """Runs one episode of an agent."""

    async def run(self, prompt: PromptView, session: AgentSession, options: Mapping[str, Any]) -> Outcome: ...


class AgentRollouter:
    """Satisfies `rlsdk.interfaces.Rollouter`.

    Agents run on a thread of their own, the server on another: an agent that blocks delays agents, and no one else.
    """

    def __init__(
        self,
        program: Program,
        form: ChatForm,
        gateway: Gateway,
        limits: EpisodeLimits,
        *,
        agent_s: float,
        supports_stop: bool,
        may_score: bool = False,
    ) -> None:
        """Args:
        program: the agent.
        form: of the model; used on the gateway's thread only.
        gateway: closed with this object.
        limits: of every episode.
        agent_s: seconds for one episode.
        supports_stop: whether the engine stops at texts.
        may_score: whether agents may score themselves over HTTP.
        """
        self._program, self._form, self._gateway, self._limits = program, form, gateway, limits
        self._agent_s, self._supports_stop, self._may_score = agent_s, supports_stop, may_score
        self._agents = LoopThread("rlsdk-agents")

    async def __call__(self, prompt: PromptView, generate: Generate, **options: Any) -> Episode:
        """See `Rollouter`.

        Raises:
            BatchError: the agent failed, or nothing of it can be trained.
        """
        try:
            return await self._played(prompt, generate, options)
        except AgentKilledError:
            # Once more: `generate` gives the calls that it makes again the turns that they had.
            return await self._played(prompt, generate, options)

    async def _played(self, prompt: PromptView, generate: Generate, options: Mapping[str, Any]) -> Episode:
        """One run of the agent, in a session of its own."""
        sampler = _StreamSampler(cast(PlacedGenerate, generate), asyncio.get_running_loop(), self._supports_stop)
        session = Session(self._form, sampler, self._limits)
        opened = await self._gateway.open(session, may_score=self._may_score)
        try:
            outcome, is_late = await self._run(prompt, opened, options)
        finally:
            await self._gateway.close_session(opened)
        if session.error is not None:
            raise session.error
        return _episode(session, self._limits, outcome, opened, is_late=is_late)

    def close(self) -> None:
        """Ends the agents and the server. Safe to call twice."""
        self._agents.close()
        self._gateway.close()

    async def _run(self, prompt: PromptView, opened: OpenSession, options: Mapping[str, Any]) -> tuple[Outcome, bool]:
        """The agent's outcome, and whether it ran out of time."""
        view = AgentSession(base_url=self._gateway.base_url(opened), api_key=opened.token, model=MODEL)
        try:
            async with asyncio.timeout(self._agent_s) as limit:
                return await self._agents.run(self._program.run(prompt, view, options)), False
        except Exception as error:
            session = opened.session
            if limit.expired():
                return Outcome(), True
            if session.ended is not None or opened.finished is not None:
                return Outcome(), False
            if session.error is not None:
                raise session.error from error
            if isinstance(error, BatchError):
                raise
            raise AgentFailedError(f"the agent failed: {type(error).__name__}: {error}") from error


class PlacedGenerate(Generate, Protocol):
    """`Generate` as the stream has it: calls name their random draws, because they may come in any order."""

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
            place: names the random draw within the sample; None: the number of calls before it.
        """
        ...


@dataclass
class _StreamSampler:
    """Samples for a session on the loop of the stream."""

    generate: PlacedGenerate
    loop: asyncio.AbstractEventLoop
    supports_stop: bool

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Text that each token adds; a character of several tokens is its last one's."""
        decode = self.generate.decode
        alone = [decode([token]) for token in ids]
        if "".join(alone) == decode(ids):
            return alone
        texts = [decode(ids[:end]).rstrip("\N{REPLACEMENT CHARACTER}") for end in range(len(ids) + 1)]
        return [text[len(before) :] for before, text in pairwise(texts)]

    @property
    def max_model_tokens(self) -> int:
        return self.generate.max_model_tokens

    @property
    def max_tokens(self) -> int:
        return self.generate.sampling.max_tokens

    async def sample(self, ids: Sequence[int], *, max_tokens: int, stop: tuple[str, ...], place: Place) -> Turn:
        sampling = self.generate(ids, max_tokens=max_tokens, stop_strings=stop, place=place)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_awaited(sampling), self.loop))


async def _awaited(sampling: Any) -> Turn:
    turn: Turn = await sampling
    return turn


def _episode(
    session: Session, limits: EpisodeLimits, outcome: Outcome, opened: OpenSession, *, is_late: bool
) -> Episode:
    if not session.tree.nodes:
        why = f"; {session.counts['refused']} requests were refused" if session.counts["refused"] else ""
        raise NoCallsError(f"the agent got no answer of the policy{why}: is base_url the session's?")
    rows = rows_of(session.tree, limits, overlapped=session.overlapped)
    if not rows.rows:
        raise AgentFailedError(f"no row of the agent is trained: {rows.not_trained} tokens; see rollout.train_roles")
    sampled = sum(len(node.span) for node in session.tree.nodes)
    finished = opened.finished
    return Episode(
        rows=rows.rows,
        chains=rows.chains,
        scales=rows.scales,
        ended=session.ended or (Ended.TIME if is_late else Ended.AGENT),
        receipt=rows.receipt(sampled, session.rendered_again, session.counts),
        tools=tuple(session.tools),
        info={**info_of(rows, session.counts, session.rendered_again), **outcome.info},
        extra={**(finished.extra if finished is not None else {}), **outcome.extra},
        reward=outcome.reward if finished is None or finished.reward is None else finished.reward,
    )
