"""Tokens in, tokens out: requests to a rollout engine and its outputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


TEMPERATURES = (1e-6, 1e6)
"""Lowest temperature above 0, and highest one: beyond them logits of float32, divided by it, lose all differences or
are not finite."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. `top_k`, `top_p` and `min_p` apply in this order to the probabilities after
    temperature; each looks at what the one before kept."""

    max_tokens: int = 512
    """Maximum number of response tokens, the stop token and `GenerationRequest.response_ids` included."""
    temperature: float = 1.0
    """0 is greedy; log-probs are then those of temperature 1. An engine may refuse values above 2, or above 0 and below
    0.01 (`ConfigError`)."""
    top_p: float = 1.0
    """Keeps the fewest tokens, the most probable ones first, whose probabilities add up to at least `top_p`."""
    top_k: int = 0
    """0 keeps the whole vocabulary, and so does any value above its size. Of equally probable tokens at the limit, any
    of them, or all, may be kept."""
    min_p: float = 0.0
    """Keeps tokens whose probability is at least `min_p` times the largest. Requires `Capability.MIN_P`."""
    stop_token_ids: tuple[int, ...] = ()
    """A response ends with (and contains) the first of these. The engine adds no stop token of its own, so the caller
    must include the end-of-sequence token here."""
    stop_strings: tuple[str, ...] = ()
    """A response ends with the token that completes one of these, in the text of the response: one that begins in the
    prompt does not count. Requires `Capability.STOP_STRINGS`."""
    seed: int | None = None
    """Sample i depends only on (seed, i, prompt, weights): not on `n`, `first_sample`, concurrent requests, or how much
    of it was passed as `response_ids`. Other seeds, and other samples of one seed, are independent draws. Any integer
    from -2**63 to 2**64 - 1. None: fresh randomness."""


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One prompt, sampled `n` times: its samples are numbered `first_sample` to `first_sample + n - 1`."""

    request_id: str
    """Unique within one call of `generate`."""
    prompt_ids: tuple[int, ...]
    """At least one token."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    first_sample: int = 0
    """`sample_index` of the first sample. Lets sample i of a group be requested again alone, with the same tokens."""
    response_ids: tuple[int, ...] = ()
    """Tokens that the response already has: for an unfinished sample that moves to another replica or continues after a
    restart. The engine continues after them. They contain no stop token and no complete stop string; a stop string that
    begins in them and ends in the new tokens is found. Outputs contain the new tokens only."""
    prompt_log_probs: int | None = None
    """k: outputs also say how probable each given token (`prompt_ids`, `response_ids`) was, and which k tokens were the
    most probable ones in its place; 0: the given tokens alone. Requires `Capability.PROMPT_LOG_PROBS`."""
    adapter_version: int | None = None
    """Version of the adapter that samples it, from its first token to its last; None: the newest one when the call
    begins. Requires `Capability.ADAPTER_VERSIONS`."""


class FinishReason(StrEnum):
    STOP = "stop"
    """A stop token or stop string; it is part of the response."""
    LENGTH = "length"
    """`max_tokens` or the engine's `max_model_tokens` was reached."""
    ABORT = "abort"
    """Ended by `abort`; the output has the tokens sampled so far."""


@dataclass(frozen=True, slots=True)
class VersionRun:
    """Consecutive tokens that were sampled under the same weights."""

    version: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class PromptLogProbs:
    """How probable the `P` tokens that a sample started from were, from the second one on: entry i is of token i + 1.

    Natural log-probs of the distribution at temperature 1, nothing left out, whatever `SamplingParams` say."""

    log_probs: NDArray[np.float32]
    """`[P - 1]`: of the given tokens."""
    top_ids: NDArray[np.int64]
    """`[P - 1, k]`: the most probable tokens, the best one first; of equally probable ones at the limit any."""
    top_log_probs: NDArray[np.float32]
    """`[P - 1, k]`: of these."""


@dataclass(frozen=True, kw_only=True)
class GenerationOutput:
    """One finished sample."""

    request_id: str
    sample_index: int
    """`first_sample` <= index < `first_sample + n` of the request."""
    token_ids: NDArray[np.int64]
    """`[L]` int64: the new tokens of the response, without `response_ids`, the stop token included."""
    log_probs: NDArray[np.float32]
    """`[L]` float32: natural log-prob of each sampled token, of the distribution after temperature and before top-k,
    top-p and min-p (or as `BackendSpec.log_prob_kind` says)."""
    finish_reason: FinishReason
    versions: tuple[VersionRun, ...]
    """Version of the weights that sampled each token, as runs in order. Their lengths sum to L; adjacent runs differ in
    version. A sample without tokens has one run of 0 tokens, with the version that would have sampled its first."""
    prompt_log_probs: PromptLogProbs | None = None
    """Of the tokens that it started from, if the request asks for them; under the weights that read them last. None
    also where a sample was aborted before it had a token."""

    @property
    def policy_version(self) -> int:
        """Version of the weights that sampled the first token."""
        return self.versions[0].version

    @property
    def last_policy_version(self) -> int:
        """Version of the weights that sampled the last token; differs only after a partial rollout."""
        return self.versions[-1].version
