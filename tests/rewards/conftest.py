from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rlsdk.interfaces import RewardSample
from rlsdk.rewards import RewardDef, RewardLimits, RewardRunner

SLICES = Path(__file__).parent.parent / "data"
FUNCTIONS = Path(__file__).parent / "functions.py"

Start = Callable[..., RewardRunner]


def sample(
    response: str, answer: str | None = "42", prompt: str = "What is 6*7?", row: Mapping[str, Any] | None = None
) -> RewardSample:
    return RewardSample(prompt=prompt, response=response, answer=answer, row=row or {}, truncated=False)


@pytest.fixture
def start() -> Iterator[Start]:
    """Makes runners for functions of `functions.py`, and closes them."""
    made: list[RewardRunner] = []

    def make(*names: str, limits: RewardLimits | None = None, **options: Any) -> RewardRunner:
        rewards = [RewardDef(name=name, target=f"{FUNCTIONS}:{name}") for name in names]
        made.append(
            RewardRunner(rewards, limits or RewardLimits(timeout_s=2.0, memory_mb=256, allow_writes=True), **options)
        )
        return made[-1]

    yield make
    for runner in made:
        runner.close()
