"""A chat model with a calculator: a rollouter for `tools-qwen2.5-7b.yaml`.

The model writes `<calc>12 * (3 + 4)</calc>`, and `<result>84</result>` stands behind it before it goes on.
"""

from __future__ import annotations

import ast
import operator
from typing import TYPE_CHECKING

from rlsdk.interfaces import FinishReason, Span, Trajectory, joined_ids

if TYPE_CHECKING:
    from rlsdk.interfaces import Generate, PromptView

OPEN, CLOSE = "<calc>", "</calc>"
OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
LONGEST, LARGEST = 120, 1e15


async def calculate(prompt: PromptView, generate: Generate, *, max_calls: int = 6) -> Trajectory:
    """Samples turn after turn until one ends without a call.

    Args:
        prompt: the problem.
        generate: the policy; `rollout.stop_strings` holds `</calc>`.
        max_calls: calls that are answered.
    """
    spans, calls, errors = [Span.given(prompt.prompt_ids)], 0, 0
    while True:
        ids = joined_ids(spans)
        if len(ids) >= generate.max_model_tokens:
            reason = FinishReason.LENGTH
            break
        turn = await generate(ids)
        spans.append(turn.span)
        reason = turn.finish_reason
        text = generate.decode(turn.span.token_ids)
        if reason is not FinishReason.STOP or CLOSE not in text[-len(CLOSE) - 8 :] or calls == max_calls:
            break
        calls += 1
        value = evaluate(text.rpartition(OPEN)[2].partition(CLOSE)[0])
        errors += value is None
        spans.append(
            Span.given(generate.encode(f"\n<result>{'error' if value is None else f'{value:.10g}'}</result>\n"))
        )
    info = {"tool_calls": float(calls), "tool_errors": float(errors)}
    return Trajectory(spans=tuple(spans), finish_reason=reason, info=info)


def evaluate(text: str) -> float | None:
    """The value of an expression of numbers, `+ - * /` and brackets; None for anything else. Nothing is executed."""
    if len(text) > LONGEST:
        return None
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.AST) -> float:
    if isinstance(node, ast.Constant):
        value = node.value
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST:
            return float(value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        result = float(OPERATIONS[type(node.op)](_value(node.left), _value(node.right)))
        if abs(result) < LARGEST:
            return result
    raise ValueError(f"not arithmetic: {ast.dump(node)}")
