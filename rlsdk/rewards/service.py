"""JSON protocol of reward services: see `docs/rewards.md`, "Rewards over HTTP"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from rlsdk.interfaces import RewardSample

VERSION = 1
"""Version of the protocol; services refuse other versions."""
SCORE_PATH = "/score"
HEALTH_PATH = "/health"


class _Message(BaseModel):
    """Base of messages: strictly typed; unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class SentSample(_Message):
    """One response with its prompt."""

    prompt: str
    response: str
    answer: str | None = None
    row: dict[str, JsonValue] = Field(default_factory=dict)
    truncated: bool = False
    extra: dict[str, JsonValue] = Field(default_factory=dict)
    response_ids: list[int] | None = None
    """None unless the client sends them (`send_tokens`)."""

    @classmethod
    def of(cls, sample: RewardSample, *, with_tokens: bool) -> Self:
        return cls.model_construct(
            prompt=sample.prompt,
            response=sample.response,
            answer=sample.answer,
            row=dict(sample.row),
            truncated=sample.truncated,
            extra=dict(sample.extra),
            response_ids=[int(token) for token in sample.response_ids] if with_tokens else None,
        )

    def to_sample(self) -> RewardSample:
        return RewardSample(
            prompt=self.prompt,
            response=self.response,
            answer=self.answer,
            row=self.row,
            truncated=self.truncated,
            extra=self.extra,
            response_ids=tuple(self.response_ids or ()),
        )


class ScoreRequest(_Message):
    """Body of `POST /score`."""

    version: int = VERSION
    samples: list[SentSample]


class SentScore(_Message):
    """Result of one sample: a score, null if the reward does not apply, or an error."""

    score: float | None = None
    token_scores: list[float] | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    error: str | None = None


class ScoreReply(_Message):
    """Body of the response to `POST /score`: one result for each sample, in order."""

    results: list[SentScore]


def describe(error: ValidationError, shown: int = 2) -> str:
    """Describes validation errors: where they are and what is wrong, without values."""
    found: Sequence[Any] = error.errors(include_url=False, include_input=False, include_context=False)
    texts = [f"{'.'.join(map(str, one['loc'])) or 'the body'}: {one['msg']}" for one in found[:shown]]
    more = f" and {len(found) - shown} more" if len(found) > shown else ""
    return "; ".join(texts) + more
