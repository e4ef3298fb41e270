"""JSON protocol of reward services: see `docs/rewards.md`, "Rewards over HTTP"."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from rlsdk.interfaces import RewardSample
from rlsdk.rewards.services.http_client import shown
from rlsdk.system.printable import encodable

VERSION = 1
"""Version of the protocol; services refuse other versions."""
SCORE_PATH = "/score"
HEALTH_PATH = "/health"
_MAX_DEPTH = 150
"""Levels of nested JSON that strict parsers read."""
_MAX_DIGITS = 4_000
"""Digits of an integer that Python converts."""


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
    errors: Sequence[Any] = error.errors(include_url=False, include_input=False, include_context=False)
    texts = [f"{'.'.join(map(str, one['loc'])) or 'the body'}: {one['msg']}" for one in errors[:shown]]
    more = f" and {len(errors) - shown} more" if len(errors) > shown else ""
    return "; ".join(texts) + more


def encode_request(samples: Sequence[bytes]) -> bytes:
    """Returns the body of a request with encoded samples."""
    return b'{"version":%d,"samples":[%b]}' % (VERSION, b",".join(samples))


def encode_sample(sample: RewardSample, *, with_tokens: bool) -> bytes:
    """Encodes a sample so that strict parsers read it. Lone surrogates become U+FFFD.

    Raises:
        ValueError: JSON parsers cannot read it, because it nests too deeply or holds a number with too many digits.
    """
    sent = SentSample.of(sample, with_tokens=with_tokens)
    try:
        data = sent.model_dump_json().encode()
    except ValueError:
        data = SentSample.model_construct(**_readable(dict(sent))).model_dump_json().encode()
    try:
        SentSample.model_validate_json(data)
    except ValidationError as error:
        raise ValueError(describe(error)) from error
    return data


def read_request(data: bytes) -> tuple[int, list[SentSample | str]]:
    """Returns the version of a request and its samples. A text stands for a sample that cannot be graded.

    Raises:
        ValueError: it is not a request; the message gives the reason.
    """
    try:
        request = ScoreRequest.model_validate_json(data)
    except ValidationError as error:
        if not _is_not_json(error):
            raise ValueError(describe(error)) from error
        return _read_leniently(data, error)
    return request.version, list(request.samples)


def _read_leniently(data: bytes, error: ValidationError) -> tuple[int, list[SentSample | str]]:
    """Reads a request that strict parsers refuse: perhaps only because of one sample."""
    loaded = _load(data)
    if not isinstance(loaded, dict) or not isinstance(loaded.get("samples"), list):
        raise ValueError(describe(error))
    faults: dict[int, str] = {}
    samples: list[Any] = []
    for at, sample in enumerate(loaded["samples"]):
        try:
            samples.append(_readable(sample))
        except ValueError as fault:
            faults[at] = f"this sample cannot be graded: {fault}"
            samples.append({"prompt": "", "response": ""})
    try:
        request = ScoreRequest.model_validate({**loaded, "samples": samples})
    except ValidationError as other:
        raise ValueError(describe(other)) from other
    return request.version, [faults.get(at, sample) for at, sample in enumerate(request.samples)]


def encode_reply(results: Sequence[SentScore]) -> bytes:
    """Returns the body of a reply. A result that JSON cannot carry becomes the error of its sample."""
    return b'{"results":[%b]}' % b",".join(map(_encode_score, results))


def _encode_score(result: SentScore) -> bytes:
    try:
        if result.error is not None:
            result = SentScore(error=encodable(result.error))
        numbers = [*result.metrics.values(), *(result.token_scores or ())]
        if all(map(math.isfinite, numbers if result.score is None else [result.score, *numbers])):
            return result.model_dump_json().encode()
        why = "the score, a token score or a metric is not finite"
    except Exception as error:
        why = type(error).__name__
    return SentScore(error=f"the result cannot be sent: {why}").model_dump_json().encode()


def read_reply(data: bytes, count: int) -> list[SentScore]:
    """Returns the results of a reply to `count` samples. An invalid one becomes the error of its sample.

    Raises:
        ValueError: it is not such a reply, or no result is valid; the message gives the reason.
    """
    try:
        results = ScoreReply.model_validate_json(data).results
    except ValidationError as error:
        loaded = _load(data)
        if not isinstance(loaded, dict) or loaded.keys() != {"results"} or not isinstance(loaded["results"], list):
            raise ValueError(f"answered no scores: {describe(error)}: {shown(data)}") from error
        read = [_read_score(one) for one in loaded["results"]]
        if not any(ok for _, ok in read):
            raise ValueError(f"answered no scores: {describe(error)}: {shown(data)}") from error
        results = [result for result, _ in read]
    if len(results) != count:
        raise ValueError(f"answered {len(results)} results; expected {count}")
    return results


def _read_score(data: Any) -> tuple[SentScore, bool]:
    """Returns a result, and whether it is valid."""
    try:
        return SentScore.model_validate(data), True
    except ValidationError as error:
        return SentScore(error=f"answered no score: {describe(error)}"), False


def _is_not_json(error: ValidationError) -> bool:
    return any(one["type"] == "json_invalid" for one in error.errors(include_url=False, include_input=False))


def _load(data: bytes) -> Any:
    """Loads JSON with lone surrogates, deep nesting and numbers of many digits; None if it is not JSON."""
    try:
        return json.loads(data, parse_int=lambda digits: int(digits) if len(digits) <= _MAX_DIGITS else float(digits))
    except (ValueError, RecursionError):
        return None


def _readable(value: Any, depth: int = 0) -> Any:
    """Returns JSON data with lone surrogates replaced.

    Raises:
        ValueError: it nests too deeply.
    """
    if depth > _MAX_DEPTH:
        raise ValueError(f"JSON that nests more than {_MAX_DEPTH} levels")
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, list | tuple):
        return [_readable(item, depth + 1) for item in value]
    if isinstance(value, Mapping):
        return {_readable(key, depth + 1): _readable(item, depth + 1) for key, item in value.items()}
    return value
