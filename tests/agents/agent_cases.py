"""Chat templates as families of models write calls of tools, and a policy that says what a script says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from rlsdk.interfaces import BatchError, FinishReason, PromptView, SamplingParams, Span, Turn, VersionRun

TOOLS_BLOCK = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
)
CHATML = (
    TOOLS_BLOCK + "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}\n"
    "<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{% if m.content %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{% if m.content or not loop.first %}\n{% endif %}CALL{% endfor %}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
JSON_CALL = (
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
)
XML_CALL = (
    "<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
)
KEYS_CALL = (
    "<tool_call>{{ c.function.name }}\n{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>"
)
HEADERS = (
    "{% for m in messages %}<|im_start|>{{ 'ipython' if m.role == 'tool' else m.role }}\n\n"
    '{% if m.tool_calls %}{"name": "{{ m.tool_calls[0].function.name }}", '
    '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}{% else %}{{ m.content }}{% endif %}<|im_end|>'
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
THINKS = (
    "{% for m in messages %}{% set last = namespace(user=false) %}{% for n in messages[loop.index0 + 1:] %}"
    "{% if n.role == 'user' %}{% set last.user = true %}{% endif %}{% endfor %}"
    "<|im_start|>{{ m.role }}\n{% if m.reasoning_content and not last.user %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}" + JSON_CALL + "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)
TEMPLATES: Mapping[str, str] = {
    "json_in_tags": CHATML.replace("CALL", JSON_CALL),
    "xml_parameters": CHATML.replace("CALL", XML_CALL),
    "xml_keys": CHATML.replace("CALL", KEYS_CALL),
    "json_message": HEADERS,
    "thinks": THINKS,
}


@cache
def tokenizer_of(name: str) -> Any:
    """A tokenizer of bytes with the control tokens of ChatML."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={piece: at for at, piece in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"]
    )
    made.chat_template = TEMPLATES[name]
    return made


class Scripted:
    """A policy that says given texts, one a turn, and an engine's numbers with them. Satisfies `Generate`."""

    def __init__(
        self, tokenizer: Any, says: Sequence[str] | Callable[[int, str], str], *, max_model_tokens: int = 100_000
    ) -> None:
        self.tokenizer, self.says = tokenizer, says
        self.max_model_tokens, self.seed = max_model_tokens, 5
        self.sampling = SamplingParams(max_tokens=20_000, stop_token_ids=(tokenizer.eos_token_id,))
        self.calls: list[list[int]] = []
        self.tools: Any = None

    async def __call__(self, token_ids: Sequence[int], *, max_tokens: int | None = None) -> Turn:
        room = self.max_model_tokens - len(token_ids)
        if room < 1:
            raise BatchError("no room")
        turn = len(self.calls)
        self.calls.append([*token_ids])
        text = self.says(turn, self.decode(token_ids)) if callable(self.says) else self.says[turn]
        ids = [*self.encode(text), self.tokenizer.eos_token_id]
        most = min(room, self.sampling.max_tokens if max_tokens is None else max_tokens)
        cut = np.asarray(ids[:most], np.int64)
        span = Span(
            token_ids=cut, log_probs=-np.arange(len(cut), dtype=np.float32), versions=(VersionRun(3, len(cut)),)
        )
        return Turn(span=span, finish_reason=FinishReason.LENGTH if len(ids) > most else FinishReason.STOP)

    def encode(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return found

    def decode(self, token_ids: Any) -> str:
        return str(self.tokenizer.decode([*token_ids], skip_special_tokens=False))

    def text(self, turn: Turn) -> str:
        return self.decode(turn.span.token_ids[:-1])


def prompt_of(**row: Any) -> PromptView:
    messages = ({"role": "user", "content": "go"},)
    return PromptView(prompt_ids=(1,), text="go", answer=None, row=row, messages=messages)


def called(name: str, arguments: str) -> str:
    """A call as JSON in tags."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
