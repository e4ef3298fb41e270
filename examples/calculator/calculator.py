"""A rollouter with turns and a tool: the model may ask a calculator before it answers.

    the prompt     141 - 365 + 200>
    the model      c(141 - 365)
    the tool       =-224;
    the model      c(-224 + 200)
    the tool       =-24;
    the model      #-24

Run it as `README.md` says; `docs/rollouters.md` explains it line by line.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rlsdk.interfaces import FinishReason, Span, Trajectory, joined_ids

if TYPE_CHECKING:
    from rlsdk.interfaces import Generate, PromptView, RewardSample

CALL = re.compile(r"c\(([^()]*)\)$")
"""At the end of a turn: the model asks, and waits."""
ANSWER = re.compile(r"#(-?[0-9]{1,9})$")
OPERATION = re.compile(r"(-?[0-9]{1,9}) ?([+*-]) ?(-?[0-9]{1,9})")
"""All that the tool understands: two whole numbers."""


async def calculate(prompt: PromptView, generate: Generate, *, max_turns: int = 4, turn_tokens: int = 20) -> Trajectory:
    """Samples turn after turn; behind each call stands what the tool said, as tokens that the policy did not sample.

    Args:
        prompt: the problem.
        generate: the policy.
        max_turns: most turns of the model; a call in the last one is not answered.
        turn_tokens: most tokens of one turn.
    """
    spans = [Span.given(prompt.prompt_ids)]
    calls = errors = 0
    while True:
        ids = joined_ids(spans)
        if len(ids) >= generate.max_model_tokens:  # a tool's answer took the last of the room
            reason = FinishReason.LENGTH
            break
        turn = await generate(ids, max_tokens=turn_tokens)
        spans.append(turn.span)
        reason = turn.finish_reason
        asked = CALL.search(generate.decode(turn.span.token_ids))
        if asked is None or reason is not FinishReason.STOP:
            break
        calls += 1
        if sum(span.sampled for span in spans) == max_turns:
            break
        value = operate(asked[1])
        errors += value is None
        spans.append(Span.given(generate.encode("=?;" if value is None else f"={value};")))
    answer = ANSWER.search(generate.text(turn)) if reason is FinishReason.STOP else None
    return Trajectory(
        spans=tuple(spans),
        finish_reason=reason,
        info={"turns": sum(span.sampled for span in spans), "tool_calls": calls, "tool_errors": errors},
        extra={"given_answer": None if answer is None else answer[1]},
    )


def operate(text: str) -> int | None:
    """The value of `a + b`, `a - b` or `a * b`; None for anything else. Nothing is evaluated that a person could not
    have typed into a pocket calculator."""
    found = OPERATION.fullmatch(text)
    if found is None:
        return None
    left, right = int(found[1]), int(found[3])
    return {"+": left + right, "-": left - right, "*": left * right}[found[2]]


def right(sample: RewardSample) -> float:
    """1 when the answer that the rollouter read out of the last turn is the row's; else half the share of its
    characters that stand in the right place."""
    given, wanted = sample.extra.get("given_answer") or "", sample.answer or ""
    if given == wanted:
        return 1.0
    matches: int = sum(a == b for a, b in zip(given, wanted, strict=False))
    return 0.5 * matches / max(len(given), len(wanted))
