"""What a rollouter produces: the tokens of one episode, span by span, and the protocols that it uses."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rlsdk.interfaces.errors import BatchError
from rlsdk.interfaces.generation import FinishReason, GenerationOutput, SamplingParams, VersionRun

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Span:
    """Tokens from one source: sampled by the policy in one request, or given (a prompt, a tool's output, a user's
    turn).

    Only sampled tokens carry a gradient. Their ids come from the engine: no text is tokenized again.
    """

    token_ids: NDArray[np.int64]
    """`[L]` int64."""
    log_probs: NDArray[np.float32] | None = None
    """Sampled span: `[L]` float32, as in `GenerationOutput`. None: the span was given."""
    versions: tuple[VersionRun, ...] = ()
    """Sampled span: the policy version of every token, as runs."""

    @property
    def sampled(self) -> bool:
        return self.log_probs is not None

    @classmethod
    def given(cls, token_ids: Sequence[int] | NDArray[np.int64]) -> Span:
        """A span that the policy did not sample."""
        import numpy as np

        return cls(token_ids=np.asarray(token_ids, np.int64))

    @classmethod
    def of(cls, output: GenerationOutput) -> Span:
        """The span that the policy sampled in one request."""
        return cls(token_ids=output.token_ids, log_probs=output.log_probs, versions=output.versions)

    def __len__(self) -> int:
        return len(self.token_ids)


def joined_ids(spans: Sequence[Span]) -> list[int]:
    """Token ids of consecutive spans, concatenated: the input of the next call of `generate`."""
    return [int(token) for span in spans for token in span.token_ids.tolist()]


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One row of a sample: its spans in order, the prompt first."""

    spans: tuple[Span, ...]
    finish_reason: FinishReason
    """Finish reason of the last sampled span. `length`: cut by a token limit; the row counts as truncated. A rollouter
    that stops because there is no room for another turn also sets `length`."""
    info: Mapping[str, float] = field(default_factory=dict)
    """Numbers about the episode (turns, tool calls); each is logged as the mean over a step, under `rollout/`."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Data for the rewards, passed on as `RewardSample.extra`: JSON types only; any other type ends the run."""

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
        """`[L]`: every token after the prompt, tool tokens included."""
        import numpy as np

        if len(self.spans) == 2:
            return self.spans[1].token_ids
        return np.concatenate([np.empty(0, np.int64), *(span.token_ids for span in self.spans[1:])])

    @property
    def response_mask(self) -> NDArray[np.bool_]:
        """`[L]`: True where the policy sampled the token of `response_ids`."""
        import numpy as np

        behind = self.spans[1:]
        return np.repeat([span.sampled for span in behind], [len(span) for span in behind]).astype(np.bool_)

    @property
    def versions(self) -> tuple[VersionRun, ...]:
        """Policy versions of all sampled tokens, as runs in order."""
        if len(self.spans) == 2:
            return (*self.spans[0].versions, *self.spans[1].versions)
        return tuple(run for span in self.spans for run in span.versions)

    @property
    def digest(self) -> str:
        """Hexadecimal digest: equal where ids, mask, log-probs and versions are, to the bit."""
        digest = hashlib.blake2b(digest_size=16)
        for span in self.spans:
            digest.update(len(span).to_bytes(8, "little") + bytes([span.sampled]))
            digest.update(span.token_ids.astype("<i4").tobytes())
            if span.log_probs is not None:
                digest.update(span.log_probs.astype("<f4").tobytes())
            for run in span.versions:
                digest.update(run.version.to_bytes(8, "little", signed=True) + run.num_tokens.to_bytes(8, "little"))
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class PromptView:
    """The prompt, as a rollouter receives it."""

    prompt_ids: tuple[int, ...]
    text: str
    """The text that was tokenized, chat template included."""
    answer: str | None
    """The row's reference answer, if it has one."""
    row: Mapping[str, Any]
    """The whole data row: JSON types only."""
    messages: Sequence[Mapping[str, Any]] = field(default=(), repr=False, compare=False)
    """The prompt as a chat, system message first: what `text` was rendered from. A prompt without a chat template is
    one user message."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Result of one call of `generate`."""

    span: Span
    """As sampled, the stop token included. Put it into the trajectory unchanged."""
    finish_reason: FinishReason
    """`stop`: a stop token or a stop string; the end of the span's text shows which one."""


class Generate(Protocol):
    """A request-level client over all replicas, bound to one sample: randomness comes from (seed, group, sample, turn).

    If a replica fails, its requests are sent again to another one and give the same tokens under the same weights.
    """

    sampling: SamplingParams
    """The run's sampling parameters: temperature, filters, stop tokens, and `max_tokens`, the limit on response tokens
    of one call. Its `seed` is not used."""
    max_model_tokens: int
    """Maximum number of tokens in a whole trajectory (`rollout.max_model_tokens`), tool tokens included. The policy
    never exceeds it; the rollouter must count given spans after the last turn itself."""
    seed: int
    """For randomness of the task itself: the same for all samples of a group, so that they can be compared."""

    async def __call__(self, token_ids: Sequence[int], *, max_tokens: int | None = None) -> Turn:
        """Samples what follows `token_ids`: the exact ids of everything so far.

        Args:
            token_ids: at least one, fewer than `max_model_tokens`. A tool's output may have used the remaining room:
                check before you call.
            max_tokens: maximum number of new tokens; None: `sampling.max_tokens`. Reduced to the room that is left.

        Raises:
            BatchError: there is no room for another token; if not caught, it fails the sample.
        """
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a text that the rollouter adds (a tool's output); special tokens in it are encoded as plain
        text."""
        ...

    def decode(self, token_ids: Sequence[int] | NDArray[np.int64]) -> str:
        """Text of token ids, including special tokens and stop tokens: for example to find the end of a tool call."""
        ...

    def text(self, turn: Turn) -> str:
        """The sampled text, without the stop token that ended it. A stop string is kept."""
        ...
