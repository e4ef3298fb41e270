"""What the tests share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsdk.interfaces import RewardSample


def sample(
    response: str, answer: str | None = "42", prompt: str = "What is 6*7?", row: Mapping[str, Any] | None = None
) -> RewardSample:
    return RewardSample(prompt=prompt, response=response, answer=answer, row=row or {}, truncated=False)
