"""A tokenizer of bytes with a chat template, and a policy that says what a script says: what the kit plays with."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlsdk.agents.chats.chat_format import ChatFormat
from rlsdk.agents.conformance.drawing import Call
from rlsdk.interfaces import FinishReason, PromptView, SamplingParams, Span, Turn, VersionRun

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROL = ("<|im_start|>", "<|im_end|>")


@functools.cache
def byte_tokenizer() -> Any:
    """A fast tokenizer of single bytes and the control tokens of a chat."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={piece: at for at, piece in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=CONTROL[1], additional_special_tokens=[CONTROL[0]])
    made.chat_template = TEMPLATE
    return made


def chat_format() -> ChatFormat:
    """How its chat is written and read."""
    return ChatFormat(byte_tokenizer(), stop_token_ids=[byte_tokenizer().eos_token_id])


class ScriptedPolicy:
    """Writes a script's calls, one a turn, then ends. Satisfies `Generate`."""

    def __init__(self, calls: Sequence[Call], seed: int) -> None:
        self._calls, self.seed, self._turn = calls, seed, 0
        self.max_model_tokens = 2**31
        self.sampling = SamplingParams(max_tokens=2**31, stop_token_ids=(byte_tokenizer().eos_token_id,))

    async def __call__(self, token_ids: Sequence[int], *, max_tokens: int | None = None) -> Turn:
        text = "Done."
        if self._turn < len(self._calls):
            name, arguments = self._calls[self._turn]
            text = f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
        self._turn += 1
        ids = np.asarray([*self.encode(text), byte_tokenizer().eos_token_id], np.int64)
        numbers = -np.arange(len(ids), dtype=np.float32)
        span = Span(token_ids=ids, log_probs=numbers, versions=(VersionRun(0, len(ids)),))
        return Turn(span=span, finish_reason=FinishReason.STOP)

    def encode(self, text: str) -> list[int]:
        made = byte_tokenizer()(text, add_special_tokens=False, split_special_tokens=True)
        found: list[int] = made["input_ids"]
        return found

    def decode(self, token_ids: Any) -> str:
        return str(byte_tokenizer().decode([*token_ids], skip_special_tokens=False))

    def text(self, turn: Turn) -> str:
        return self.decode(turn.span.token_ids[:-1])


def prompt_of(row: Any) -> PromptView:
    """A row's prompt, as a run makes it of its field `prompt`."""
    text = row.get("prompt")
    messages = tuple(text) if isinstance(text, list) else ({"role": "user", "content": str(text or "Begin.")},)
    return PromptView(prompt_ids=(1,), text="", answer=row.get("answer"), row=row, messages=messages)
