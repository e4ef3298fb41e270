"""Prompts: sources, rendering, filters, order.

`load_rows` -> `split_by_content` -> `PromptDataset` -> `PromptStream`; each is usable without the next.
"""

from __future__ import annotations

from rlsdk.data.answers import (
    Answer,
    AnswerEncoder,
    AnswerEnds,
    AnswerReport,
    answer_notes,
    answer_report,
    learned_reply,
)
from rlsdk.data.chat import ChatTemplate, Tokenizer
from rlsdk.data.control_tokens import LiteralEncoder, special_ids
from rlsdk.data.conversations import LearnedRow, TurnTokens, earlier_turns, learned_rows
from rlsdk.data.mixture import MixturePart, next_part
from rlsdk.data.pairs import PairFields
from rlsdk.data.prompts import FilterReport, NoPromptError, Prompt, PromptDataset, encode_prompts
from rlsdk.data.render import PromptFormat, Template, check_plain, render
from rlsdk.data.rows import DataRow, JsonValue, Messages, Pair, Reply, Steps, lookup, missing_field, to_json, to_row
from rlsdk.data.sources import Loader, SourceName, check_source, load_rows, parse_source
from rlsdk.data.split import distinct, drop_seen, question_key, split_by_content
from rlsdk.data.steps import StepFields
from rlsdk.data.stream import PromptStream, epoch_order

__all__ = [
    "Answer",
    "AnswerEncoder",
    "AnswerEnds",
    "AnswerReport",
    "ChatTemplate",
    "DataRow",
    "FilterReport",
    "JsonValue",
    "LearnedRow",
    "LiteralEncoder",
    "Loader",
    "Messages",
    "MixturePart",
    "NoPromptError",
    "Pair",
    "PairFields",
    "Prompt",
    "PromptDataset",
    "PromptFormat",
    "PromptStream",
    "Reply",
    "SourceName",
    "StepFields",
    "Steps",
    "Template",
    "Tokenizer",
    "TurnTokens",
    "answer_notes",
    "answer_report",
    "check_plain",
    "check_source",
    "distinct",
    "drop_seen",
    "earlier_turns",
    "encode_prompts",
    "epoch_order",
    "learned_reply",
    "learned_rows",
    "load_rows",
    "lookup",
    "missing_field",
    "next_part",
    "parse_source",
    "question_key",
    "render",
    "special_ids",
    "split_by_content",
    "to_json",
    "to_row",
]
