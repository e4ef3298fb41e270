"""Chat templates as families of models have them, and a byte-level tokenizer for each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from .conftest import make_tokenizer

EOS = "<end>"
"""The end-of-sequence token of every tokenizer here."""

CHATML_TOOLS = """\
{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.last and thinking is defined %}<think>
{{ m.reasoning_content | default('') }}
</think>

{% endif %}{% if m.content %}{{ m.content }}{% endif %}{% for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass(frozen=True)
class Family:
    """How one family writes a conversation."""

    template: str
    end: str
    """The token that ends an assistant's turn."""
    tokens: tuple[str, ...] = ()


FAMILIES = {
    "chatml": Family(CHATML_TOOLS, "<|im_end|>", ("<|im_start|>", "<|im_end|>")),
    "llama3": Family(
        "{{ '<|begin|>' }}{% for m in messages %}<|header|>{{ m.role }}<|/header|>\n\n{{ m.content | trim }}<|eot_id|>"
        "{% endfor %}{% if add_generation_prompt %}<|header|>assistant<|/header|>\n\n{% endif %}",
        "<|eot_id|>",
        ("<|begin|>", "<|header|>", "<|/header|>", "<|eot_id|>"),
    ),
    "gemma": Family(
        "<bos>{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        "<end_of_turn>",
        ("<bos>", "<start_of_turn>", "<end_of_turn>"),
    ),
    "mistral": Family(
        "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content }}</s>"
        "{% endif %}{% endfor %}",
        "</s>",
        ("<s>", "</s>"),
    ),
    "phi": Family(
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|done|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}",
        "<|done|>",
        ("<|user|>", "<|assistant|>", "<|done|>"),
    ),
    "coder": Family(
        "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n{% if m.role == 'assistant' %}<|EOT|>\n{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}### assistant:\n{% endif %}",
        "<|EOT|>",
        ("<|EOT|>",),
    ),
    "nothing": Family(PLAIN, EOS),
    "eos": Family(PLAIN.replace("\n{% endfor", "{{ eos_token if m.role == 'assistant' else '\n' }}{% endfor"), EOS),
}


@cache
def tokenizer_of(name: str) -> Any:
    family = FAMILIES[name]
    made = make_tokenizer(chat_template=family.template)
    made.add_special_tokens({"additional_special_tokens": list(family.tokens)})
    return made


def end_of(name: str) -> int:
    return int(tokenizer_of(name).convert_tokens_to_ids(FAMILIES[name].end))


def reference_ids(tokenizer: Any, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
    """What transformers makes of a conversation."""
    return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **kwargs))
