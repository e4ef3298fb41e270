"""Which fields of a source's rows hold prompt and answer, where nobody has named them."""

from __future__ import annotations

from collections.abc import Mapping

from rlsdk.data.messages import ASSISTANT, as_messages
from rlsdk.data.rows import Fields, JsonValue, lookup

PROMPT_FIELDS = ("question", "prompt", "problem", "instruction", "input", "query", "messages", "conversations")
ANSWER_FIELDS = (
    "answer", "solution", "completion", "response", "ground_truth", "reward_model.ground_truth", "label", "target",
    "output",
)  # fmt: skip
"""Names that are tried, in this order; the first that a source's first row has is taken."""


def find_fields(row: Mapping[str, JsonValue]) -> Fields:
    """The fields of a source by its first row; the first name of each table where the row has none of them.

    A conversation that ends in the assistant's turn holds its own answer: only a field `answer` is looked for.
    """
    prompt = next((name for name in PROMPT_FIELDS if _value(row, name) is not None), Fields.prompt)
    turns = as_messages(_value(row, prompt))
    names = ANSWER_FIELDS[:1] if turns and turns[-1].get("role") == ASSISTANT else ANSWER_FIELDS
    answer = next((name for name in names if _value(row, name) is not None), Fields.answer)
    return Fields(prompt=prompt, answer=answer)


def _value(row: Mapping[str, JsonValue], name: str) -> JsonValue:
    try:
        return lookup(row, name)
    except KeyError:
        return None
