"""A tiny model of random weights that plays environments from the start: each of its turns is a call of one tool."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlsdk.testing.process.models import write_tiny_model

_CHAT = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments.ARGUMENT }}{% endfor %}"
    "{{ m.content }}{% endfor %}"
)
_ENDS = [*"abcdefghijklmnopqrstuvwxyz0123456789"]


def write_caller(folder: Path, tool: str, argument: str) -> None:
    """Writes `model/` and `rows.jsonl`: whatever the model writes is the text `argument` of a call of `tool`."""
    from transformers import AutoTokenizer

    write_tiny_model(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    call = {"name": tool, "arguments": {argument: "{content}"}}
    tokenizer.chat_template = _CHAT.replace("ARGUMENT", argument)
    tokenizer.response_template = {
        "start_anchor_pattern": r"\Z",
        "fields": {
            "content": {"open": "<unk>", "close_pattern": r"\Z", "repeats": True, "join": ""},
            "tool_calls": {
                "content": "text",
                "repeats": True,
                "transform": {"type": "function", "function": call},
            },
        },
    }
    tokenizer.save_pretrained(folder / "model")
    rows = [{"prompt": f"{name}{name}:"} for name in "ABCDEF"]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_arguments(folder: Path, environment: str) -> list[str]:
    """Of `rlsdk`, for a run of two steps of that model in an environment."""
    rows = str(folder / "rows.jsonl")
    ends = ["--rollout.stop_token_ids", json.dumps(["<eos>", *_ENDS])]
    return [*_arguments(folder, rows), "--rollout.environment", environment, "--rollout.max_turns", "2", *ends]


def agent_arguments(folder: Path, data: str, agent: str) -> list[str]:
    """Of `rlsdk`, for a run of two steps of that model as what an agent talks to; it says what comes, and no call."""
    tools = ["--rollout.tool_format", "json_in_tags"]
    return [*_arguments(folder, data), "--rollout.agent", agent, "--rollout.max_turns", "2", *tools]


def _arguments(folder: Path, data: str) -> list[str]:
    return [
        "train", "--model", str(folder / "model"), "--data", data, "--rollout.max_response_tokens", "8",
        "--rollout.max_model_tokens", "96", "--data.max_prompt_tokens", "16", "--trainer.steps", "2",
        "--trainer.prompts_per_step", "2", "--trainer.samples_per_prompt", "3", "--train.optim.lr", "1e-3",
        "--tracking.trackers", "[jsonl]", "--eval.every_steps", "null", "--trainer.save_every_steps", "null",
        "--trainer.run_name", "run", "--trainer.run_dir", str(folder / "runs"),
    ]  # fmt: skip


def steps_of(folder: Path) -> list[Mapping[str, Any]]:
    """Metrics of that run's steps."""
    lines = (folder / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "reward/mean" in line]
