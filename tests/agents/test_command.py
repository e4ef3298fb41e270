"""A command as an agent: what its process gets, and what it does not."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from rlsdk.agents.programs.command import CommandProgram
from rlsdk.interfaces import AgentSession, PromptView

SESSION = AgentSession(base_url="http://127.0.0.1:9/sessions/k/v1", api_key="k", model="policy")
COPY = "import os, shutil, sys; shutil.copy(os.environ['RLSDK_TASK'], sys.argv[1])"


def task_of(folder: Path, *row_fields: str) -> dict[str, Any]:
    """The task as a process of the command found it."""
    copy = folder / "task.json"
    program = CommandProgram([sys.executable, "-c", COPY, str(copy)], row_fields=row_fields)
    row = {"question": "2 + 2", "answer": "four", "level": 3, "solution": "count to four"}
    prompt = PromptView(
        prompt_ids=(1,), text="2 + 2", answer="four", row=row, messages=[{"role": "user", "content": "2 + 2"}]
    )
    asyncio.run(program.run(prompt, SESSION, {"tries": 2}))
    found: dict[str, Any] = json.loads(copy.read_text())
    return found


def test_the_task_has_no_answer_unless_it_is_named(tmp_path: Path) -> None:
    found = task_of(tmp_path)
    assert found == {
        "prompt": "2 + 2", "messages": [{"role": "user", "content": "2 + 2"}], "row": {}, "options": {"tries": 2},
        "model": "policy", "base_url": SESSION.base_url,
    }  # fmt: skip
    assert "four" not in json.dumps(found)
    assert task_of(tmp_path, "level", "answer", "absent")["row"] == {"level": 3, "answer": "four"}
