"""The advantage estimators once more, as the papers write them: loops over rows and tokens in plain Python."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

from algorithm_cases import PlainRow

Rows = list[PlainRow]
Numbers = list[list[float]]


def outcome(row: PlainRow) -> float:
    return math.fsum(row.fields["token_level_rewards"])


def group(row: PlainRow, rows: Rows) -> Rows:
    """Valid rows of the same prompt."""
    return [other for other in rows if other.valid and other.uid == row.uid]


def on_rows(rows: Rows, number: Callable[[PlainRow, list[float]], float]) -> Numbers:
    """`number(row, rewards of its group)` on each response token; 0 where a row cannot be compared."""
    found = []
    for row in rows:
        others = group(row, rows)
        value = number(row, [outcome(o) for o in others]) if row.valid and len(others) > 1 else 0.0
        found.append([value] * row.length)
    return found


def grpo(rows: Rows) -> Numbers:
    return on_rows(rows, lambda row, g: (outcome(row) - statistics.fmean(g)) / (statistics.stdev(g) + 1e-6))


def grpo_batch(rows: Rows) -> Numbers:
    everyone = [outcome(row) for row in rows if row.valid]
    spread = statistics.stdev(everyone) if len(everyone) > 1 else 0.0
    return on_rows(rows, lambda row, g: (outcome(row) - statistics.fmean(g)) / (spread + 1e-6))


def dr_grpo(rows: Rows) -> Numbers:
    return on_rows(rows, lambda row, g: outcome(row) - statistics.fmean(g))


def grpo_passk(rows: Rows) -> Numbers:
    def best(row: PlainRow, g: list[float]) -> float:
        first, second = sorted(g, reverse=True)[:2]
        return (first - second) / (statistics.stdev(g) + 1e-6) if outcome(row) == first > second else 0.0

    return on_rows(rows, best)


def rloo(rows: Rows) -> Numbers:
    return on_rows(rows, lambda row, g: outcome(row) - (math.fsum(g) - outcome(row)) / (len(g) - 1))


def opo(rows: Rows) -> Numbers:
    found = []
    for row in rows:
        others = group(row, rows)
        total = sum(o.length for o in others)
        if not row.valid or len(others) < 2 or not total:
            found.append([0.0] * row.length)
            continue
        baseline = math.fsum(o.length * outcome(o) for o in others) / total
        found.append([outcome(row) - baseline] * row.length)
    return found


def gpg(rows: Rows) -> Numbers:
    comparable = [row for row in rows if row.valid and len(group(row, rows)) > 1]
    teaching = [row for row in comparable if len({outcome(o) for o in group(row, rows)}) > 1]
    alpha = len(comparable) / max(len(teaching), 1)
    return on_rows(rows, lambda row, g: alpha * (outcome(row) - statistics.fmean(g)) if len(set(g)) > 1 else 0.0)


def returns(row: PlainRow, gamma: float) -> list[float]:
    found: list[float] = []
    for reward in reversed(row.fields["token_level_rewards"] if row.valid else [0.0] * row.length):
        found.insert(0, reward + gamma * (found[0] if found else 0.0))
    return found


def reinforce(rows: Rows, gamma: float = 0.9) -> Numbers:
    return [returns(row, gamma) for row in rows]


def remax(rows: Rows) -> Numbers:
    return [
        [value - row.baseline for value in returns(row, 1.0)]
        if row.valid and math.isfinite(row.baseline)
        else [0.0] * row.length
        for row in rows
    ]


def whitened(numbers: Numbers, counts: list[bool]) -> Numbers:
    """Mean 0, variance 1 over the tokens of the rows that count; the others 0."""
    tokens = [value for row, counted in zip(numbers, counts, strict=True) if counted for value in row]
    if len(tokens) < 2:
        return [[0.0] * len(row) for row in numbers]
    mean, variance = statistics.fmean(tokens), statistics.variance(tokens)
    return [
        [(value - mean) / math.sqrt(variance + 1e-8) if counted else 0.0 for value in row]
        for row, counted in zip(numbers, counts, strict=True)
    ]


def reinforce_plus_plus(rows: Rows) -> Numbers:
    return whitened([returns(row, 0.9) for row in rows], [row.valid for row in rows])


def reinforce_plus_plus_baseline(rows: Rows) -> Numbers:
    return whitened(dr_grpo(rows), [row.valid and len(group(row, rows)) > 1 for row in rows])


def gae_of(row: PlainRow, gamma: float, lam: float) -> list[float]:
    values, rewards = row.fields["values"], row.fields["token_level_rewards"]
    found, running, following = [], 0.0, 0.0
    for value, reward in reversed(list(zip(values, rewards, strict=True))):
        running = reward + gamma * following - value + gamma * lam * running
        following = value
        found.insert(0, running if row.valid else 0.0)
    return found


def gae(rows: Rows) -> Numbers:
    return whitened([gae_of(row, 0.9, 0.7) for row in rows], [row.valid for row in rows])


def gae_returns(rows: Rows, lam: float = 0.7) -> Numbers:
    return [
        [a + v if row.valid else 0.0 for a, v in zip(gae_of(row, 0.9, lam), row.fields["values"], strict=True)]
        for row in rows
    ]
