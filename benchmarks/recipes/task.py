"""The recipes' task: words to spell backward, pairs of answers to them, and a warmed-up model for each seed.

All of it is generated; nothing is downloaded.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from benchmarks.recipes.commands import rlsdk

SETTINGS = Path(__file__).with_name("task.yaml")
LETTERS = 4
HELD_OUT = 256
"""Words that are never trained on."""
PAIRS_PER_WORD = 4
"""Each with a wrong answer of its own: with one, the 600 steps of a model of scores would see it nine times."""


@dataclass(frozen=True)
class Task:
    """Files of the task in one folder."""

    folder: Path
    in_process: bool = False
    """Reinforcement learning runs without a cluster."""

    @property
    def train(self) -> Path:
        return self.folder / "train.jsonl"

    @property
    def held_out(self) -> Path:
        return self.folder / "held_out.jsonl"

    @property
    def pairs(self) -> Path:
        """Of the words that are trained on, several for each."""
        return self.folder / "pairs.jsonl"

    def base(self, seed: int) -> Path:
        """The warmed-up model that every row of this seed begins with."""
        return self.folder / f"base-{seed}" / "model"

    def flags(self, seed: int, *, pairs: bool = False) -> list[str]:
        """Of every command, but the model."""
        data = self.pairs if pairs else self.train
        return [
            "--config", str(SETTINGS), "--data", str(data), "--data.eval", str(self.held_out),
            "--data.num_eval_rows", "null", "--trainer.run_dir", str(self.folder), "--trainer.seed", str(seed),
        ]  # fmt: skip


def make_task(folder: Path, *, in_process: bool = False) -> Task:
    """Writes words, pairs and the untrained model where they are not there yet."""
    task = Task(folder.resolve(), in_process)
    if not task.held_out.exists() or not task.pairs.exists():
        task.folder.mkdir(parents=True, exist_ok=True)
        write_untrained_model(task.folder)
        rows = task_rows()
        write_rows(task.train, rows[HELD_OUT:])
        write_rows(task.pairs, more_pairs(rows[HELD_OUT:]))
        write_rows(task.held_out, rows[:HELD_OUT])
    return task


def warm_up(task: Task, seed: int) -> Path:
    """Trains the model of this seed on answers, unless that was done; returns its folder."""
    base = task.base(seed)
    if not base.exists():
        shutil.rmtree(base.parent, ignore_errors=True)
        model = ["--model", str(task.folder / "model"), "--model.init_from_config", "true"]
        flags = [*model, *task.flags(seed), "--trainer.run_name", base.parent.name]
        rlsdk("sft", *flags, log=task.folder, in_process=task.in_process)
    return base


def task_rows() -> list[dict[str, Any]]:
    """One row for each word, shuffled: the task's own item, with a right and a wrong answer as a pair."""
    import reasoning_gym

    task = reasoning_gym.create_dataset(
        "spell_backward", size=12_000, seed=42, min_word_len=LETTERS, max_word_len=LETTERS
    )
    items = {item["metadata"]["word"].lower(): item for item in task}
    drawn = random.Random(0)
    words = sorted(items)
    drawn.shuffle(words)
    return [
        {
            **items[word],
            "answer": word[::-1],
            "chosen": word[::-1],
            "rejected": wrong_answer(word[::-1], [one[::-1] for one in words], drawn),
        }
        for word in words
    ]


def more_pairs(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`PAIRS_PER_WORD` of each row, its own the first."""
    drawn = random.Random(1)
    answers = [row["answer"] for row in rows]
    further = [
        {**row, "rejected": wrong_answer(row["answer"], answers, drawn)}
        for _ in range(PAIRS_PER_WORD - 1)
        for row in rows
    ]
    return [*rows, *further]


def wrong_answer(answer: str, answers: Sequence[str], drawn: random.Random) -> str:
    """Three of four with a mistake, the others another word's."""
    return misspelt(answer, drawn) if drawn.random() < 0.75 else other(answer, answers, drawn)


def misspelt(answer: str, drawn: random.Random) -> str:
    """Another text of the same length, with one mistake or two, such as the warmed-up model makes: two letters change
    places, or one is another letter of the word, seldom of the alphabet."""
    letters = list(answer)
    while letters == list(answer):
        for _ in range(drawn.choice((1, 1, 2))):
            here, there = drawn.sample(range(len(letters)), 2)
            kind = drawn.random()
            if kind < 0.3:
                letters[here], letters[there] = letters[there], letters[here]
            else:
                letters[here] = letters[there] if kind < 0.8 else drawn.choice(ascii_lowercase)
    return "".join(letters)


def other(answer: str, answers: Sequence[str], drawn: random.Random) -> str:
    """Of some answers the one that has most letters in common with this one, so that none is the better one whatever
    the prompt."""
    some = [one for one in drawn.sample(answers, 30) if one != answer]
    return max(some, key=lambda one: sum(a == b for a, b in zip(one, answer, strict=True)))


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def write_untrained_model(folder: Path) -> None:
    """The quickstart's model: two layers, random weights, a tokenizer of letters."""
    from rlsdk.config import load_config
    from rlsdk.registry import Registry
    from rlsdk.trainer.runs.quickstart import make_model

    config = load_config([], ["--data", "quickstart:spell_backward"], Registry.discover())
    make_model(config, folder)
