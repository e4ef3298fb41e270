"""Writes what the example starts from: sums with demonstrations, and a model of random weights. Nothing is downloaded.

python examples/calculator/prepare.py [FOLDER] [--chat]

--chat: the tokenizer gets a chat template, which writes messages one behind the other; for agent.py.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from rlsdk.kit.model.tokenizers import write_char_tokenizer

FOLDER = Path("runs/calculator-task")
ROWS = 12_000
CALLS_SHARE = 0.5
"""Of the demonstrations that ask the calculator; the others answer at once."""


def rows() -> Iterator[dict[str, str]]:
    """`chain_sum` of reasoning-gym: two or three numbers of three digits."""
    import reasoning_gym

    draw = random.Random(0)
    task = reasoning_gym.create_dataset(
        "chain_sum", seed=42, size=ROWS, min_terms=2, max_terms=3, min_digits=3, max_digits=3
    )
    for row in task:
        terms = row["metadata"]["expression"]
        asks = draw.random() < CALLS_SHARE
        yield {
            "question": terms,
            "answer": row["answer"],
            "demonstration": (calls(terms) if asks else "") + f"#{row['answer']}",
        }


def calls(terms: str) -> str:
    """The sum, one operation at a time, as the calculator is asked for it."""
    first, *rest = terms.split()
    total, text = int(first), ""
    for sign, number in zip(rest[::2], rest[1::2], strict=True):
        after = total + (int(number) if sign == "+" else -int(number))
        text += f"c({total} {sign} {number})={after};"
        total = after
    return text


def write_model(folder: Path, *, chat: bool = False) -> None:
    """`config.json` of a Llama of 1.1 million parameters, and a character tokenizer."""
    from transformers import LlamaConfig

    tokenizer = write_char_tokenizer(folder, "0123456789+-*= ()c;#?>")
    if chat:
        tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
        tokenizer.save_pretrained(folder)
    LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=128,
        attention_bias=True,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)


def main(folder: Path, *, chat: bool = False) -> None:
    """Writes `train.jsonl` and `model/` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder / "model", chat=chat)
    with (folder / "train.jsonl").open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows())


if __name__ == "__main__":
    folders = [argument for argument in sys.argv[1:] if argument != "--chat"]
    main(Path(folders[0]) if folders else FOLDER, chat="--chat" in sys.argv)
