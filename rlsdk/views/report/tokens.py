"""A response with coloured tokens: by the difference of the two engines' log-probs, or by improbability."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlsdk.views.report.markup import escaped, number_of

DIFFERENCES = (0.05, 0.2, 0.5)
"""Thresholds in nats of the difference between the train engine's and the rollout engine's log-prob, for three
shades."""
PROBABILITIES = (0.5, 0.1, 0.01)
"""Thresholds of the probability below which a token is coloured."""


@dataclass(frozen=True, kw_only=True)
class Token:
    """One token of a response."""

    text: str
    """Text; empty if the token is only part of a character that a later token completes."""
    rollout: float | None
    """Log-prob in nats by the rollout engine; None: not sampled (output of a tool, say)."""
    train: float | None
    """Log-prob by the train engine before the step's first update; None: not recomputed."""

    @property
    def difference(self) -> float | None:
        return None if self.train is None or self.rollout is None else self.train - self.rollout

    @property
    def marks(self) -> str:
        """CSS classes of the token."""
        names = [] if self.rollout is not None else ["given"]
        if (gap := self.difference) is not None and (depth := sum(abs(gap) >= least for least in DIFFERENCES)):
            names.append(f"{'u' if gap > 0 else 'd'}{depth}")
        if self.rollout is not None and (depth := sum(self.rollout < math.log(most) for most in PROBABILITIES)):
            names.append(f"p{depth}")
        return " ".join(names)

    @property
    def said(self) -> str:
        """Its numbers as text."""
        if self.rollout is None:
            return "given, not sampled"
        chance = f"probability {math.exp(min(self.rollout, 0.0)):.3g}, log-prob {self.rollout:.4f}"
        if self.train is None or self.difference is None:
            return chance
        return f"{chance}; train engine {self.train:.4f}, difference {self.difference:+.4f}"


def tokens_of(sample: Mapping[str, Any]) -> list[Token]:
    """The tokens logged with a sample; empty if there are none, or if they are inconsistent."""
    pieces, rollout = sample.get("tokens"), sample.get("log_probs")
    train = sample.get("train_log_probs")
    if not isinstance(pieces, list) or not isinstance(rollout, list) or len(pieces) != len(rollout):
        return []
    trained = train if isinstance(train, list) and len(train) == len(pieces) else [None] * len(pieces)
    return [
        Token(text=str(text), rollout=number_of(first), train=number_of(second))
        for text, first, second in zip(pieces, rollout, trained, strict=True)
    ]


def coloured(tokens: Sequence[Token]) -> str:
    """The text as HTML, with a mark around every coloured token."""
    return "".join(_spans(tokens))


def _spans(tokens: Sequence[Token]) -> Iterator[str]:
    for token in tokens:
        marks = token.marks
        if marks and token.text:
            yield f'<span class="t {marks}" title="{escaped(token.said)}">{escaped(token.text)}</span>'
        else:
            yield escaped(token.text)
