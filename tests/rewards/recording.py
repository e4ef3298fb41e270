"""Reward functions that return records; loaded by path, in a grading process."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from rlsdk.interfaces import RewardRecord, RewardSample


def by_token(sample: RewardSample) -> RewardRecord:
    """A number for every token: its id over 100."""
    tokens = [token / 100 for token in sample.response_ids]
    return RewardRecord(score=0.5, token_scores=tokens, metrics={"tokens": len(tokens), "prompt.chars": 3})


by_token.reads_tokens = True  # type: ignore[attr-defined]


def evaluating_by_token(sample: RewardSample) -> RewardRecord:
    """The same from a function that runs text, so that it is called in a fork of its own."""
    assert eval("1") == 1
    return by_token(sample)


evaluating_by_token.reads_tokens = True  # type: ignore[attr-defined]


def sees_tokens(sample: RewardSample) -> float:
    return float(len(sample.response_ids))


def some(sample: RewardSample) -> Any:
    """For some samples only."""
    actions: dict[str, Callable[[], Any]] = {
        "none": lambda: None,
        "skip": lambda: RewardRecord(score=None, metrics={"skipped": 1}),
        "raise": lambda: 1 // 0,
    }
    return actions.get(sample.response, lambda: 2.0)()


def wrong(sample: RewardSample) -> Any:
    """A record with the fault that the response names."""
    faults: dict[str, Callable[[], Any]] = {
        "mapping": lambda: {"score": 1.0},
        "text score": lambda: RewardRecord(score="1"),  # type: ignore[arg-type]
        "nan score": lambda: RewardRecord(score=math.nan),
        "text tokens": lambda: RewardRecord(score=1, token_scores="abc"),  # type: ignore[arg-type]
        "nested tokens": lambda: RewardRecord(score=1, token_scores=[[1.0], [2.0]]),  # type: ignore[list-item]
        "nan token": lambda: RewardRecord(score=1, token_scores=[0.0, math.inf]),
        "three tokens": lambda: RewardRecord(score=1, token_scores=[0.0] * 3),
        "tokens alone": lambda: RewardRecord(score=None, token_scores=[0.0, 0.0]),
        "many tokens": lambda: RewardRecord(score=1, token_scores=[0.0] * 1000),
        "list metrics": lambda: RewardRecord(score=1, metrics=[1.0]),  # type: ignore[arg-type]
        "nan metric": lambda: RewardRecord(score=1, metrics={"m": math.nan}),
        "bad name": lambda: RewardRecord(score=1, metrics={"a/b": 1.0}),
        "own name": lambda: RewardRecord(score=1, metrics={"failed_share": 1.0}),
        "many metrics": lambda: RewardRecord(score=1, metrics={f"m{at}": 1.0 for at in range(5)}),
    }
    return faults.get(sample.response, lambda: 1.0)()


def counts_calls(samples: Sequence[RewardSample]) -> list[Any]:
    return [RewardRecord(score=len(samples)) if at else None for at, _ in enumerate(samples)]


counts_calls.batched = True  # type: ignore[attr-defined]


def prints_much(sample: RewardSample) -> float:
    print("x" * 3000)
    return 1.0
