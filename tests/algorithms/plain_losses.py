"""The policy losses once more, token by token in plain Python floats."""

from __future__ import annotations

import math
from typing import Any

from rlsdk.interfaces import PolicyLossInputs


def rows_of(inputs: PolicyLossInputs) -> list[list[int]]:
    """Positions of each row's response tokens."""
    row, mask = inputs.batch.row_of_token.tolist(), inputs.mask.tolist()
    return [[t for t in range(len(mask)) if mask[t] and row[t] == b] for b in range(inputs.batch.num_rows)]


def clipped(ratio: float, advantage: float, low: float, high: float) -> float:
    return -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def losses(name: str, inputs: PolicyLossInputs, **options: Any) -> list[float]:
    """Loss of every token; 0 off the mask."""
    current, old = inputs.log_probs.tolist(), inputs.old_log_probs.tolist()
    advantages = inputs.advantages.tolist()
    found = [0.0] * len(current)
    for row in rows_of(inputs):
        log_ratios = [min(max(current[t] - old[t], -20.0), 20.0) for t in row]
        mean = math.fsum(log_ratios) / max(len(row), 1)
        for t, log_ratio in zip(row, log_ratios, strict=True):
            ratio, a = math.exp(log_ratio), advantages[t]
            if name == "ppo_clip":
                found[t] = clipped(ratio, a, options["clip_low"], options["clip_high"])
                if options.get("dual_clip") is not None and a < 0:
                    found[t] = min(found[t], -options["dual_clip"] * a)
            elif name == "gspo":
                found[t] = clipped(math.exp(mean), a, options["clip_low"], options["clip_high"])
            elif name == "cispo":
                low = 0.0 if options["clip_low"] is None else 1 - options["clip_low"]
                found[t] = -a * min(max(ratio, low), 1 + options["clip_high"]) * current[t]
            elif name == "sapo":
                tau = options["tau_positive"] if a > 0 else options["tau_negative"]
                found[t] = -a * 4 / tau / (1 + math.exp(-tau * (ratio - 1)))
            else:
                found[t] = -a * current[t]
    return found
