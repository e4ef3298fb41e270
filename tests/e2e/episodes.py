"""A task of several turns that a random model plays from the start: every turn calls a tool, which leaves a trace."""

from __future__ import annotations

import json
from pathlib import Path

from rlsdk.testing.process.models import write_tiny_model

ENVIRONMENT = '''
import os
import time
from pathlib import Path


class Diary:
    """What is said is counted."""

    def __init__(self, trace: str, slow_s: float = 0.0) -> None:
        self._trace, self._slow_s = Path(__file__).with_name(f"{trace}.txt"), slow_s

    def reset(self, prompt: str) -> str:
        self._trace_of("reset")
        self._said, self._first = "", prompt[0]
        return ""

    def say(self, text: str) -> str:
        """Says something.

        Args:
            text: what
        """
        time.sleep(self._slow_s)
        self._trace_of("say")
        self._said += text
        return f"[{len(self._said)}]"

    def get_reward(self) -> float:
        return sum(letter.islower() for letter in self._said) / 20

    def _trace_of(self, what: str) -> None:
        with self._trace.open("a") as file:
            file.write(what + "\\n")


class Echo(Diary):
    """Its tool has no state. The first letter that was said decides."""

    stateless = ("say",)

    def say(self, text: str) -> str:
        """Says something.

        Args:
            text: what
        """
        time.sleep(self._slow_s)
        self._trace_of(f"say {os.getpid()}")
        return f"[{len(text)}]"
'''
CHAT = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments.text }}{% endfor %}"
    "{{ m.content }}{% endfor %}"
)
CALLS = {
    "start_anchor_pattern": r"\Z",
    "fields": {
        "content": {"open": "<unk>", "close_pattern": r"\Z", "repeats": True, "join": ""},
        "tool_calls": {
            "content": "text",
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "say", "arguments": {"text": "{content}"}}},
        },
    },
}
"""Whatever the model writes is a call."""
ENDS = [*"abcdefghijklmnopqrstuvwxyz0123456789"]


def write_task(folder: Path) -> None:
    """A model, an environment and its rows."""
    from transformers import AutoTokenizer

    write_tiny_model(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.chat_template, tokenizer.response_template = CHAT, CALLS
    tokenizer.save_pretrained(folder / "model")
    (folder / "diary.py").write_text(ENVIRONMENT)
    rows = [{"prompt": f"{name}{name}:"} for name in "ABCDEF"]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def arguments(
    folder: Path, name: str, *extra: str, trace: str = "whole", slow_s: float = 0.0, environment: str = "Diary"
) -> list[str]:
    """Of a run of three steps with this environment.

    Args:
        folder: of the task.
        name: of the run.
        extra: more arguments.
        trace: what the environment does is written into this file, with the suffix `.txt`. Not by its path: a run that
            is resumed knows the content of files that options name.
        slow_s: how long the tool takes.
        environment: name of its class.
    """
    options = json.dumps({"trace": trace, "slow_s": slow_s})
    return [
        "train", "--model", str(folder / "model"), "--data", str(folder / "rows.jsonl"), "--rollout.environment",
        f"{folder / 'diary.py'}:{environment}", "--rollout.environment_options", options, "--rollout.max_turns", "3",
        "--rollout.stop_token_ids", json.dumps(["<eos>", *ENDS]), "--rollout.max_response_tokens", "8",
        "--rollout.max_model_tokens", "64", "--data.max_prompt_tokens", "16", "--trainer.steps", "3",
        "--trainer.prompts_per_step", "2", "--trainer.samples_per_prompt", "3", "--train.optim.lr", "1e-3",
        "--schedule.journal", "all", "--tracking.trackers", "[jsonl]", "--eval.every_steps", "null",
        "--trainer.run_name", name, "--trainer.run_dir", str(folder / "runs"), *extra,
    ]  # fmt: skip
