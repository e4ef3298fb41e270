"""Writes what tic-tac-toe starts from: positions of random games with random moves, and a model of random weights.

python examples/tictactoe/positions.py
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from tictactoe import FREE, free, seen, winner

from rlsdk.kit.model.tokenizers import write_char_tokenizer

FOLDER = Path("runs/tictactoe-task")
GAMES, HELD_OUT, POSITIONS = 6_000, 512, 12_000


def positions() -> Iterator[dict[str, str]]:
    """What a player sees, and a free square: which moves there are, and nothing of which are good."""
    draw = random.Random(0)
    count = 0
    while count < POSITIONS:
        board = [FREE] * 9
        for ply in range(9):
            square = draw.choice(free(board))
            yield {"prompt": seen(board, ply % 2), "answer": f"{square + 1};"}
            count += 1
            board[square] = ply % 2
            if winner(board) is not None:
                break


def games() -> Iterator[dict[str, str]]:
    """Games of the policy with itself."""
    for game in range(GAMES):
        yield {"prompt": f"{game:04d}>", "plays": "both"}


def held_out() -> Iterator[dict[str, str]]:
    """Games against a random player, in turn as the first and as the second one."""
    for game in range(HELD_OUT):
        yield {"prompt": f"{game:04d}>", "plays": "second" if game % 2 else "first"}


def write_model(folder: Path) -> None:
    """`config.json` of a Llama of 0.3 million parameters, and a character tokenizer."""
    from transformers import LlamaConfig

    tokenizer = write_char_tokenizer(folder, "0123456789xo.;>")
    LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=16,
        attention_bias=True,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)


def main(folder: Path) -> None:
    """Writes `games.jsonl`, `held_out.jsonl`, `positions.jsonl` and `model/` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder / "model")
    for name, rows in (("games", games()), ("held_out", held_out()), ("positions", positions())):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
