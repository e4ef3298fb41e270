"""What one run of an agent on one prompt made: rows of tokens with one score, and the protocol of what makes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from rlsdk.interfaces.errors import BatchError
from rlsdk.interfaces.generation import FinishReason
from rlsdk.interfaces.trajectory import Generate, PromptView, Trajectory

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Ended(StrEnum):
    """What ended an episode."""

    AGENT = "agent"
    """The agent or its environment: it was done."""
    TURNS = "turns"
    """The limit on turns."""
    TOKENS = "tokens"
    """The limit on sampled tokens, of a turn or of the episode."""
    CONTEXT = "context"
    """No room was left in a row."""
    ROWS = "rows"
    """The limit on rows."""
    TIME = "time"
    """The time limit."""
    TOOL_ERROR = "tool_error"
    """Too many tool failures in a row."""

    @classmethod
    def of(cls, reason: FinishReason) -> Ended:
        """What ended an episode that ends with its last turn, which ended for this reason."""
        return cls.TOKENS if reason is FinishReason.LENGTH else cls.AGENT


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """Where every token that was sampled for an episode went: `sampled` is `trained` plus all of `not_trained`."""

    sampled: int
    """Tokens that the engine sampled for the episode."""
    trained: int
    """Those that are sampled in one of its rows."""
    not_trained: Mapping[str, int] = field(default_factory=dict)
    """Reason -> tokens that are in no row: `abandoned` (drawn again by the agent), `auxiliary` (a call for another
    purpose), `over_limit` (rows beyond the limit)."""
    rendered_again: Mapping[str, int] = field(default_factory=dict)
    """Reason -> turns whose history could not be continued by ids, and began a new row: `edited`, `compacted`,
    `thinking`, `template`, `no_match`."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Other counts of its calls: `continued`, `neutralised` (texts with control tokens), `delivered_again`."""
    digests: tuple[str, ...] = ()
    """Digest of each row: token ids, mask, log-probs and versions."""

    def __post_init__(self) -> None:
        accounted = self.trained + sum(self.not_trained.values())
        if self.sampled != accounted or min(self.trained, *self.not_trained.values(), 0) < 0:
            raise BatchError(
                f"a receipt of {self.sampled} sampled tokens accounts for {accounted}: {self.trained} trained, "
                f"{dict(self.not_trained)} not trained; every sampled token is trained once, or not, with the reason"
            )


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """A call of a tool that the model made, and its answer."""

    turn: int
    """Number of the model's answer that made the call, from 0, in the order in which answers were asked for."""
    name: str
    arguments: Mapping[str, Any]
    """JSON types."""
    result: str
    """Text that the model got."""
    failed: bool = False
    """Whether `result` says what was wrong."""
    seconds: float | None = None
    """None: an agent called it, which nobody timed."""


@dataclass(frozen=True, kw_only=True)
class Episode:
    """What one run of an agent on one prompt made: one score, one advantage, one row or more."""

    rows: tuple[Trajectory, ...]
    """In the order of their first sampled tokens: one where the history only grew, several where it forked or was
    rewritten. A sampled token is sampled in one row only; other rows may repeat it as a given one."""
    chains: tuple[int, ...] = ()
    """Chain of each row, from 0: rows of a chain follow one another in time, such as those of one agent of several.
    Empty: all are of chain 0."""
    scales: tuple[float, ...] = ()
    """Factor of each row's loss, which the normaliser counts. Empty: 1."""
    ended: Ended = Ended.AGENT
    receipt: Receipt | None = None
    """Account of its tokens; None: none was kept."""
    tools: tuple[ToolUse, ...] = ()
    """Calls of tools that were answered, in order: for the journal, and for people. Nothing is trained on them."""
    info: Mapping[str, float] = field(default_factory=dict)
    """As `Trajectory.info`, whose numbers it is joined with."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """As `Trajectory.extra`; joined with that of the last row."""
    reward: float | None = None
    """Score of the environment or agent, added to that of the configured rewards; None: only these score it, and
    without any it counts as invalid."""
    chain_rewards: Mapping[int, float] = field(default_factory=dict)
    """Score of single chains, by their numbers, added to the episode's: players who win and lose by themselves. Each
    chain is then compared with the same chain of the group's other samples; the episode's score remains what is logged.
    """
    token_rewards: NDArray[np.float64] | None = None
    """`[tokens after the prompts]`, of one row after another: rewards of single tokens, added to those of the
    configured rewards; ignored on given tokens. None: there are none."""

    def __post_init__(self) -> None:
        if not self.rows:
            raise BatchError("an episode without rows: give at least one Trajectory, or raise to fail the sample")
        for name, values in (("chains", self.chains), ("scales", self.scales)):
            if values and len(values) != len(self.rows):
                raise BatchError(f"episode: {len(values)} {name} for {len(self.rows)} rows; give one a row, or none")
        if any(chain < 0 for chain in self.chains):
            raise BatchError(f"episode: chains {list(self.chains)}; expected numbers from 0")
        if any(not (math.isfinite(scale) and scale > 0) for scale in self.scales):
            raise BatchError(f"episode: scales {list(self.scales)}; expected finite numbers above 0")
        if self.reward is not None and not math.isfinite(self.reward):
            raise BatchError(f"episode: reward {self.reward!r}; expected a finite number, or None for no score")
        self._check_chain_rewards()
        if self.token_rewards is not None:
            expected = sum(row.num_tokens - len(row.spans[0]) for row in self.rows)
            if len(self.token_rewards) != expected:
                given = f"{len(self.token_rewards)} token_rewards"
                raise BatchError(f"episode: {given} for {expected} tokens after the prompts of its rows")
        if self.receipt is not None:
            sampled = sum(row.num_sampled for row in self.rows)
            if self.receipt.trained != sampled:
                raise BatchError(f"episode: its receipt has {self.receipt.trained} trained tokens, its rows {sampled}")

    def _check_chain_rewards(self) -> None:
        known = {*self.chains} or {0}
        for chain, reward in self.chain_rewards.items():
            if chain not in known:
                raise BatchError(f"episode: chain_rewards of chain {chain!r}; its rows have the chains {sorted(known)}")
            if not math.isfinite(reward):
                raise BatchError(f"episode: chain_rewards[{chain}] is {reward!r}; expected a finite number")

    @classmethod
    def of(cls, trajectory: Trajectory) -> Episode:
        """The episode of one row."""
        return cls(rows=(trajectory,), ended=Ended.of(trajectory.finish_reason))

    @property
    def truncated(self) -> bool:
        """Whether a limit ended it, and not the agent."""
        return self.ended is not Ended.AGENT or self.rows[-1].finish_reason is FinishReason.LENGTH

    @property
    def joined_info(self) -> Mapping[str, float]:
        """Its numbers and those of its rows; of a number that several have, the last one."""
        numbers = [*(row.info for row in self.rows), self.info]
        return {name: value for each in numbers for name, value in each.items()}


class Rollouter(Protocol):
    """Makes one sample: `async def rollout(prompt, generate, **options) -> Trajectory | Episode`.

    A `Trajectory` is an episode of one row. Called once for each sample of a group, concurrently on one event loop. It
    may await anything, with a timeout, and must not block: run anything longer than a few milliseconds in
    `asyncio.to_thread`. An exception fails its sample, which is counted and carries no gradient; a `RlsdkError` other
    than `BatchError` ends the run. `docs/rollouters.md` shows one with a tool.
    """

    async def __call__(self, prompt: PromptView, generate: Generate, **options: Any) -> Trajectory | Episode: ...
