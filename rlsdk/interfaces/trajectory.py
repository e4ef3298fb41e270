"""What a rollouter makes: the tokens of one episode, span by span, and the protocols it is written against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rlsdk.interfaces.errors import BatchError
from rlsdk.interfaces.generation import FinishReason, SamplingParams, VersionRun

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Span:
    """Tokens of one origin: sampled by the policy in one request, or given (a prompt, a tool's answer, a user's turn).

    Only sampled tokens carry a gradient. Their ids are those of the engine: no text is tokenized again.
    """

    token_ids: NDArray[np.int64]
    """`[L]` int64."""
    log_probs: NDArray[np.float32] | None = None
    """`[L]` float32, of a sampled span: as in `GenerationOutput`. None: the span was given."""
    versions: tuple[VersionRun, ...] = ()
    """Of a sampled span: the policy version of every token, as runs."""

    @property
    def sampled(self) -> bool:
        return self.log_probs is not None

    @classmethod
    def given(cls, token_ids: Sequence[int] | NDArray[np.int64]) -> Span:
        """A span that the policy did not sample."""
        import numpy as np

        return cls(token_ids=np.asarray(token_ids, np.int64))

    def __len__(self) -> int:
        return len(self.token_ids)


def joined_ids(spans: Sequence[Span]) -> list[int]:
    """Token ids of neighbouring spans, end to end: what the next call of `generate` is given."""
    return [int(token) for span in spans for token in span.token_ids.tolist()]


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One sample: its spans in order, the prompt first."""

    spans: tuple[Span, ...]
    finish_reason: FinishReason
    """Of the last sampled span. `length`: cut by a token limit; the row counts as truncated. A rollouter that stops
    because there is no room for another turn says `length`, too."""
    info: Mapping[str, float] = field(default_factory=dict)
    """Numbers about the episode (turns, tool calls); each is logged as the mean over a step, under `rollout/`."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What the rollouter hands to the rewards, as `RewardSample.extra`: JSON types only; others end the run."""

    def __post_init__(self) -> None:
        if not self.spans or self.spans[0].log_probs is not None or not len(self.spans[0].token_ids):
            raise BatchError("a trajectory begins with a span that was given, of at least one token: its prompt")

    @property
    def num_tokens(self) -> int:
        """Prompt, response and tool tokens."""
        return sum(len(span.token_ids) for span in self.spans)

    @property
    def num_sampled(self) -> int:
        return sum(len(span) for span in self.spans if span.sampled)

    @property
    def response_ids(self) -> NDArray[np.int64]:
        """`[L]` every token behind the prompt, tool tokens included."""
        import numpy as np

        if len(self.spans) == 2:
            return self.spans[1].token_ids
        return np.concatenate([np.empty(0, np.int64), *(span.token_ids for span in self.spans[1:])])

    @property
    def response_mask(self) -> NDArray[np.bool_]:
        """`[L]`: which of `response_ids` the policy sampled."""
        import numpy as np

        behind = self.spans[1:]
        return np.repeat([span.sampled for span in behind], [len(span) for span in behind]).astype(np.bool_)

    @property
    def versions(self) -> tuple[VersionRun, ...]:
        """Of all sampled tokens, in order."""
        if len(self.spans) == 2:
            return (*self.spans[0].versions, *self.spans[1].versions)
        return tuple(run for span in self.spans for run in span.versions)


@dataclass(frozen=True, kw_only=True)
class PromptView:
    """What a rollouter sees of the prompt that it answers."""

    prompt_ids: tuple[int, ...]
    text: str
    """What was tokenized, chat template included."""
    answer: str | None
    """The row's reference answer, when it has one."""
    row: Mapping[str, Any]
    """The whole data row: JSON types only."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What one call of `generate` came to."""

    span: Span
    """As sampled, the stop token included. Goes into the trajectory as it is."""
    finish_reason: FinishReason
    """`stop`: a stop token or a stop string; which one is seen at the end of the text of the span's tokens."""


class Generate(Protocol):
    """A request-level client over all replicas, bound to one sample: randomness comes from (seed, group, sample, turn).

    A request that a replica lost is issued again elsewhere, and gives the same tokens under the same weights.
    """

    sampling: SamplingParams
    """Of the run: temperature, filters, stop tokens, and `max_tokens`, the response tokens of one call. Its `seed` is
    not the one that is used."""
    max_model_tokens: int
    """Most tokens of a whole trajectory (`rollout.max_model_tokens`), those of tools included. The policy never goes
    beyond; given spans behind the last turn are the rollouter's to count."""

    async def __call__(self, token_ids: Sequence[int], *, max_tokens: int | None = None) -> Turn:
        """Samples what follows `token_ids`: the exact ids of everything so far.

        Args:
            token_ids: at least one, fewer than `max_model_tokens`. A tool's answer may have taken the last of the room:
                look before you call.
            max_tokens: most new tokens; None: `sampling.max_tokens`. Never more than the model has room for.

        Raises:
            BatchError: there is no room for another token; let through, it fails the sample.
        """
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a text of the rollouter's own (a tool's answer), special tokens in it taken as text."""
        ...

    def decode(self, token_ids: Sequence[int] | NDArray[np.int64]) -> str:
        """Text of token ids, special tokens and stop tokens shown: to look for the end of a tool call, say."""
        ...

    def text(self, turn: Turn) -> str:
        """What was sampled, decoded without the stop token that ended it. A stop string stays in it."""
        ...


class Rollouter(Protocol):
    """Makes one sample: `async def rollout(prompt, generate, **options) -> Trajectory`.

    Called once for each sample of a group, all at once on one event loop; it may await anything, must bound what it
    awaits, and must not block: what takes longer than some milliseconds goes to `asyncio.to_thread`. What it raises
    fails its sample, which is counted and carries no gradient; errors of rlsdk (`RlsdkError`, but for `BatchError`) end
    the run. `docs/agents.md` shows one with a tool.
    """

    async def __call__(self, prompt: PromptView, generate: Generate, **options: Any) -> Trajectory: ...
