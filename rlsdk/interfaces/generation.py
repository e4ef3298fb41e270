"""Tokens in, tokens out: what is asked of a rollout engine and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled."""

    max_tokens: int = 512
    """Most response tokens, the stop token included."""
    temperature: float = 1.0
    """0 is greedy: the log-prob then is that of temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    min_p: float = 0.0
    """Keeps tokens of at least this share of the likeliest one's probability. Needs `Capability.MIN_P`."""
    stop_token_ids: tuple[int, ...] = ()
    """A response ends with (and contains) the first of these. Nothing else stops it: the engine adds no token of
    its own, so the caller names the end-of-sequence token here."""
    stop_strings: tuple[str, ...] = ()
    """A response ends with the token that completes one of these. Needs `Capability.STOP_STRINGS`."""
    seed: int | None = None
    """Sample i of the request depends on (seed, i, prompt, weights) alone. None: fresh randomness."""


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One prompt, sampled `n` times."""

    request_id: str
    prompt_ids: tuple[int, ...]
    """At least one token."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1


class FinishReason(StrEnum):
    STOP = "stop"
    """A stop token or stop string; it is part of the response."""
    LENGTH = "length"
    """`max_tokens` or the engine's `max_model_tokens` was reached."""
    ABORT = "abort"
    """Ended by `abort`; the tokens so far are given."""


@dataclass(frozen=True, kw_only=True)
class GenerationOutput:
    """One finished sample."""

    request_id: str
    sample_index: int
    """0 <= index < n of the request."""
    token_ids: NDArray[np.int64]
    """`[L]` int64, response only, the stop token included."""
    log_probs: NDArray[np.float32]
    """`[L]` float32: natural log-prob of each sampled token, of the distribution after temperature and before top-k,
    top-p and min-p (or as `BackendSpec.log_prob_kind` says)."""
    finish_reason: FinishReason
    policy_version: int
    """Version of the weights that sampled the first token."""
    last_policy_version: int
    """Version of the weights that sampled the last token; differs only after a partial rollout."""
