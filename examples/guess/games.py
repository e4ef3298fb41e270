"""Writes what the example starts from: games with random guesses, and a model of random weights. Nothing is downloaded.

python examples/guess/games.py
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from rlsdk.kit.model.tokenizers import write_char_tokenizer

FOLDER = Path("runs/guess-task")
ROWS = 9_000
HIGHEST, GUESSES = 15, 4
CHAT = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}g{{ c.function.arguments.number }};{% endfor %}"
    "{{ m.content }}{% endfor %}"
)
"""A model asks `g8;`, and the tool answers `<`."""
CALLS = {
    "start_anchor_pattern": r"\Z",
    "fields": {
        "content": {"repeats": True, "join": ""},
        "tool_calls": {
            "open": "g",
            "close_pattern": r"\Z",
            "content": "int",
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "guess", "arguments": {"number": "{content}"}}},
        },
    },
}
"""How such a turn is read (`transformers.utils.chat_parsing`): what follows `g` is a number."""


def rows() -> Iterator[dict[str, str]]:
    """Games, each with a number of its own before the question mark, which says nothing about the answer."""
    draw = random.Random(0)
    for game in range(ROWS):
        number = draw.randint(1, HIGHEST)
        yield {"prompt": f"{game:04d}?", "answer": str(number), "demonstration": at_random(number, draw)}


def at_random(number: int, draw: random.Random) -> str:
    """A game of random guesses, with the answers of the tool."""
    text = ""
    for _ in range(GUESSES):
        guess = draw.randint(1, HIGHEST)
        text += f"g{guess};" + ("=" if guess == number else "<" if number < guess else ">")
        if guess == number:
            break
    return text


def write_model(folder: Path, characters: str = "0123456789g;<>=?") -> None:
    """`config.json` of a Llama of 0.3 million parameters, and a character tokenizer with a chat template."""
    from transformers import LlamaConfig

    tokenizer = write_char_tokenizer(folder, characters)
    tokenizer.chat_template = CHAT
    tokenizer.response_template = CALLS
    tokenizer.save_pretrained(folder)
    LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        attention_bias=True,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)


def main(folder: Path) -> None:
    """Writes `train.jsonl` and `model/` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder / "model")
    with (folder / "train.jsonl").open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows())


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
