"""A command as an agent: what its process gets, and what it does not."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlsdk.agents.programs.command import AgentKilledError, CommandProgram
from rlsdk.interfaces import AgentSession, PromptView

DIES = """
import os, signal, sys
from pathlib import Path
Path(sys.argv[1]).open("a").write("x")
os.kill(os.getpid(), signal.SIGKILL)
"""
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


PARENT = """
import asyncio, sys
from test_command import SESSION, CommandProgram, PromptView
prompt = PromptView(prompt_ids=(1,), text="", answer=None, row={})
print("ready", flush=True)
asyncio.run(CommandProgram([sys.executable, "-c", sys.argv[1], sys.argv[2]]).run(prompt, SESSION, {}))
"""
SLEEPS = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"


def test_a_signal_is_no_end_of_an_episode(tmp_path: Path) -> None:
    program = CommandProgram([sys.executable, "-c", DIES, str(tmp_path / "runs")])
    prompt = PromptView(prompt_ids=(1,), text="", answer=None, row={})
    with pytest.raises(AgentKilledError, match="was ended by SIGKILL"):
        asyncio.run(program.run(prompt, SESSION, {}))


def test_a_command_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    if shutil.which("setpriv") is None:
        pytest.skip("no setpriv here, by which the kernel is asked for it")
    words = [sys.executable, "-c", PARENT, SLEEPS, str(tmp_path / "pid")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    parent = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 60
        while not (tmp_path / "pid").is_file() or not (tmp_path / "pid").read_text():
            assert time.monotonic() < end
            time.sleep(0.02)
        command = psutil.Process(int((tmp_path / "pid").read_text()))
    finally:
        parent.kill()
        parent.wait()
    psutil.wait_procs([command], timeout=30)
    assert not command.is_running() or command.status() == psutil.STATUS_ZOMBIE
