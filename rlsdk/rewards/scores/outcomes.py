"""A reward's outcome for one sample: parsed from the function's return value, and checked at every process boundary."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlsdk.interfaces import RewardRecord
from rlsdk.interfaces.settings import RewardLimits
from rlsdk.rewards.scores.definitions import OWN_METRICS, FailureKind

_METRIC = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,63}")
_EXPECTED = "expected a number, a RewardRecord, or None where the reward does not apply"
_MESSAGE_CHARS = 400


@dataclass(frozen=True, kw_only=True, eq=False)
class Graded:
    """The value that a reward returned for one sample."""

    score: float | None
    """None: the reward does not apply to the sample."""
    token_scores: NDArray[np.float64] | None = None
    """`[response tokens]`."""
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Failed:
    """Why a reward has no value for a sample."""

    kind: FailureKind
    message: str


Outcome: TypeAlias = float | Graded | Failed
"""Outcome of one item. Most rewards return a plain number, which is sent as a float."""

NOT_APPLICABLE = Graded(score=None)


class NonsenseError(ValueError):
    """The returned value is not a valid reward; the message gives the reason."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def to_outcome(value: object, limits: RewardLimits) -> Outcome:
    """Converts the return value of a reward function to an outcome."""
    try:
        if value is None:
            return NOT_APPLICABLE
        if isinstance(value, RewardRecord):
            return check_graded(value.score, value.token_scores, value.metrics, limits)
        return check_number(value, limits)
    except NonsenseError as error:
        return failed(error.kind, str(error))


def values_in_order(returned: object, count: int, what: str) -> list[object]:
    """Returns the values that a batched function gave, one for each of its `count` samples.

    Args:
        returned: any iterable with an order: a list, an array, a generator.
        count: number of samples.
        what: the samples, in messages: "completions".

    Raises:
        NonsenseError: it is not `count` values.
    """
    expected = f"expected {count} values, one for each of the {what}, in their order"
    if isinstance(returned, str | bytes | bytearray | Mapping | Set):
        raise NonsenseError(FailureKind.TYPE, f"the function gave a {type(returned).__name__}; {expected}")
    try:
        each = iter(returned)  # type: ignore[call-overload]
    except TypeError:
        raise NonsenseError(FailureKind.TYPE, f"the function gave a {type(returned).__name__}; {expected}") from None
    values = list(islice(each, count + 1))
    if len(values) != count:
        noun = f"{what[:-1] if count == 1 else what}"
        more = "more than " if len(values) > count else ""
        scores = min(len(values), count)
        raise NonsenseError(
            FailureKind.TYPE,
            f"{count} {noun}, {more}{scores} {'score' if scores == 1 else 'scores'}; {expected}",
        )
    return values


def failed(kind: FailureKind, message: str, hint: str = "") -> Failed:
    """A failure with a message of bounded length, followed by `hint`."""
    return Failed(kind=kind, message=message[:_MESSAGE_CHARS] + hint)


def check_number(value: object, limits: RewardLimits, what: str = "") -> float:
    """Returns `value` as a float, and checks that it is finite and not too large.

    Args:
        value: anything that `float` accepts, except text.
        limits: its `max_value` applies.
        what: beginning of error messages; empty: "the function gave".

    Raises:
        NonsenseError: it is not such a number.
    """
    gave = what or "the function gave"
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        expected = "expected a number" if what else _EXPECTED
        raise NonsenseError(FailureKind.TYPE, f"{gave} a {type(value).__name__}, {expected}: {value!r:.80}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    except Exception as error:
        raise NonsenseError(FailureKind.TYPE, f"{gave} a {type(value).__name__}, not a number: {error}") from error
    if not math.isfinite(number):
        raise NonsenseError(FailureKind.NAN, f"{gave} {number}")
    if abs(number) > limits.max_value:
        limit = f"reward_limits.max_value {limits.max_value:g}"
        raise NonsenseError(FailureKind.NAN, f"{gave} {number:g}, which exceeds {limit}")
    return number


def check_graded(score: object, token_scores: object, metrics: object, limits: RewardLimits) -> Graded:
    """Checks type and size of each part of a record.

    Raises:
        NonsenseError: a part is invalid; the message gives the part and its value.
    """
    number = None if score is None else check_number(score, limits, "the record has a score of")
    tokens = None if token_scores is None else _check_tokens(token_scores, limits)
    if number is None and tokens is not None:
        raise NonsenseError(
            FailureKind.TYPE, "the record has token_scores without a score; expected a score too, such as 0.0"
        )
    return Graded(score=number, token_scores=tokens, metrics=_check_metrics(metrics, limits))


def check_length(graded: Graded, num_tokens: int) -> Failed | None:
    """Returns a failure if there is not one token score for each response token, else None."""
    if graded.token_scores is None or len(graded.token_scores) == num_tokens:
        return None
    return failed(
        FailureKind.TYPE,
        f"the record has {len(graded.token_scores)} token_scores; expected {num_tokens}, one for each of the sample's "
        f"response_ids (set `reads_tokens = True` on the function to get them)",
    )


def _check_tokens(values: object, limits: RewardLimits) -> NDArray[np.float64]:
    try:
        if isinstance(values, str | bytes | Mapping):
            raise TypeError
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        array = None
    if array is None or array.ndim != 1:
        raise NonsenseError(
            FailureKind.TYPE, f"the record has token_scores of {values!r:.80}; expected a flat list of numbers"
        )
    wrong = ~np.isfinite(array) | (np.abs(array) > limits.max_value)
    if wrong.any():
        at = int(wrong.argmax())
        raise NonsenseError(
            FailureKind.NAN, f"the record has {array[at]:g} in token_scores, at position {at}; expected finite numbers"
        )
    return array


def _check_metrics(metrics: object, limits: RewardLimits) -> dict[str, float]:
    if not isinstance(metrics, Mapping):
        raise NonsenseError(FailureKind.TYPE, f"the record has metrics of {metrics!r:.80}; expected names and numbers")
    if len(metrics) > limits.max_metrics:
        raise NonsenseError(
            FailureKind.TYPE,
            f"the record has {len(metrics)} metrics, more than reward_limits.max_metrics {limits.max_metrics}",
        )
    for name in metrics:
        if not isinstance(name, str) or not _METRIC.fullmatch(name) or name in OWN_METRICS:
            raise NonsenseError(
                FailureKind.TYPE,
                f"the record has a metric named {name!r:.80}; expected letters, digits, '_', '-' and '.', at most 64, "
                f"and none of {list(OWN_METRICS)}",
            )
    return {name: check_number(value, limits, f"metric {name!r} is") for name, value in metrics.items()}
