"""A script that trains: what a person writes first, on real engines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlsdk.testing.process.models import write_tiny_model

HEAD = """
import json, os, sys
import rlsdk

DIGITS = set("0123456789")


def share(text):
    return sum(letter in DIGITS for letter in text) / max(len(text), 1)


def score(sample):
    return share(sample.response)


def contains(completions, solution, **columns):
    return [float(right in text) for text, right in zip(completions, solution)]


def rows():
    for a in range(8):
        for b in range(8):
            yield {"prompt": f"{a}+{b}=", "solution": str(a + b)}


small = {
    "trainer": {"prompts_per_step": 4, "samples_per_prompt": 4, "save_every_steps": None},
    "rollout": {"max_response_tokens": 6},
    "data.max_prompt_tokens": 32,
    "data.num_eval_rows": 8,
    "tracking": {"trackers": ["jsonl"]},
}
"""
TWO_RUNS = """
def train(**more):
    return rlsdk.train("tiny", rows(), [score, {"name": contains, "weight": 0.5}], **{**small, **more})

first = train(steps=1)
bigger = {**small["trainer"], "save_every_steps": 5}
second = train(steps=2, trainer=bigger)
os.mkdir("elsewhere"); os.chdir("elsewhere")
third = second.resume(steps=3)
print(json.dumps({
    "steps": [run.steps for run in (first, second, third)],
    "paths": [str(run.path) for run in (first, second, third)],
    "rewards": second.metrics.column("reward/mean")[0] == first.metrics.column("reward/mean")[0],
    "columns": second.metrics.columns,
    "samples": sorted(second.samples[0]),
    "checkpoints": [path.name for path in third.checkpoints],
    "responses": third.generate("1+1=", samples_per_prompt=2),
    "figures": third.evaluate(),
}))
"""
STOPPED = """
class View(rlsdk.Quiet):
    def step(self, step, steps, metrics):
        if step == 2:
            os.kill(os.getpid(), 2)

run = rlsdk.train("tiny", list(rows()), score, steps=500, view=View(), **small)
print(json.dumps({"stopped": run.stopped, "steps": run.steps, "goes_on": True}))
"""
REFUSED = """
os.environ["RAY_START_IS_A_MISTAKE"] = "1"
held = open(__file__)


def not_alone(sample):
    return held.fileno()


mistakes = {
    "closure": lambda: rlsdk.train("tiny", list(rows()), not_alone, steps=1, **small),
    "field": lambda: rlsdk.train("tiny", list(rows()), score, steps=1, trainer={"steps": -1}),
    "file": lambda: rlsdk.train("tiny", "nowhere.jsonl", score, steps=1, **small),
    "reward": lambda: rlsdk.train("tiny", list(rows()), "mine.py:scroe", steps=1, **small),
    "plan": lambda: rlsdk.plan("tiny", list(rows()), "mine.py:scroe", **small),
}
said = {}
for name, call in mistakes.items():
    try:
        call()
    except rlsdk.RlsdkError as error:
        said[name] = str(error)
print(json.dumps({"said": said, "left": sorted(os.listdir(".")), "ray": "ray" in sys.modules}))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def started(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "script.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False
    )


def run_script(text: str, folder: Path, model: Path) -> dict[str, Any]:
    """The last line that a script prints, in a folder of its own; it has no `if __name__ == "__main__"`."""
    (folder / "tiny").symlink_to(model)
    (folder / "mine.py").write_text("def score(sample):\n    return 1.0\n")
    (folder / "script.py").write_text(HEAD + text)
    done = started(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_script_trains_twice_and_goes_on_from_anywhere(tmp_path: Path, model: Path) -> None:
    """Functions of the script and a generator; the second run of the process has a Ray of its own."""
    found = run_script(TWO_RUNS, tmp_path, model)
    assert found["steps"] == [1, 2, 3]
    assert found["rewards"]  # the same seed, whatever ran before
    first, second, third = found["paths"]
    assert first != second
    assert second == third
    assert {"reward/score", "reward/contains", "eval/accuracy_greedy"} <= set(found["columns"])
    assert {"prompt", "response", "answer", "score", "advantage"} <= set(found["samples"])
    assert found["checkpoints"] == ["step_00000002", "step_00000003"]
    assert [row["prompt"] for row in found["responses"]] == ["1+1=", "1+1="]
    assert "eval/accuracy_greedy" in found["figures"]
    written = [path.suffix for path in (Path(second) / "inputs").iterdir() if path.is_file()]
    assert sorted(written) == [".jsonl", ".py", ".py"]


def test_an_interrupt_ends_the_run_and_not_the_script(tmp_path: Path, model: Path) -> None:
    found = run_script(STOPPED, tmp_path, model)
    assert found == {"stopped": True, "steps": 2, "goes_on": True}


def test_what_cannot_be_used_is_refused_before_anything_starts(tmp_path: Path, model: Path) -> None:
    found = run_script(REFUSED, tmp_path, model)
    assert "uses 'held', a _io.TextIOWrapper, which cannot be written as Python" in found["said"]["closure"]
    assert "trainer.steps: given twice" in found["said"]["field"]
    assert "nowhere.jsonl: no such file" in found["said"]["file"]
    assert "no function 'scroe'; did you mean 'score'?" in found["said"]["reward"]
    assert "no function 'scroe'; did you mean 'score'?" in found["said"]["plan"]
    assert found["left"] == ["mine.py", "script.py", "tiny"]
    assert not found["ray"]


def test_sigterm_means_the_program(tmp_path: Path, model: Path) -> None:
    """As a scheduler sends it: what was trained is saved, and whoever started the script sees that it was cut short."""
    (tmp_path / "tiny").symlink_to(model)
    text = STOPPED.replace("os.getpid(), 2", "os.getpid(), 15")
    (tmp_path / "script.py").write_text(HEAD + text.replace('"goes_on"', '"unreachable"'))
    done = started(tmp_path)
    assert done.returncode == 75, done.stdout + done.stderr
    assert "unreachable" not in done.stdout
    # Ray's own handler, which a thread that starts Ray would leave, and which aborts what it takes to be a crash.
    assert "SIGTERM received" not in done.stderr
    assert signal.SIGTERM == 15
