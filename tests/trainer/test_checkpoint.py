"""A checkpoint is whole or absent, whatever happens while it is written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlsdk.interfaces import CheckpointError
from rlsdk.trainer.checkpoint import MANIFEST, CheckpointStore, faults, read_state


def fill(store: CheckpointStore, step: int, text: str = "weights") -> Path:
    with store.write(step, {"trainer": {"step": step}}) as folder:
        (folder / "actor").mkdir()
        (folder / "actor" / "model.bin").write_text(text)
    return store.folder / f"step_{step:08d}"


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    path = fill(CheckpointStore(tmp_path, keep=3), 10)
    assert read_state(path) == {"trainer": {"step": 10}}
    assert (path / "actor" / "model.bin").read_text() == "weights"


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3, 10):
        fill(store, step)
    assert [step for step, _ in store.whole()] == [3, 10]
    assert store.newest() == tmp_path / "step_00000010"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000003", "step_00000010"]


def fail(store: CheckpointStore, step: int) -> None:
    with store.write(step, {}) as folder:
        (folder / "half").write_text("x")
        raise RuntimeError("engine")


def test_an_error_while_writing_leaves_the_earlier_one_newest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    fill(store, 1)
    with pytest.raises(RuntimeError, match="engine"):
        fail(store, 2)
    assert store.newest() == tmp_path / "step_00000001"


@pytest.mark.parametrize("damage", ["cut", "missing", "no manifest", "torn manifest"])
def test_a_damaged_checkpoint_is_never_taken_for_whole(tmp_path: Path, damage: str) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    fill(store, 1)
    path = fill(store, 2)
    match damage:
        case "cut":
            (path / "actor" / "model.bin").write_text("w")
        case "missing":
            (path / "actor" / "model.bin").unlink()
        case "no manifest":
            (path / MANIFEST).unlink()
        case "torn manifest":
            (path / MANIFEST).write_text('{"files": {')
    assert faults(path)
    assert store.newest() == tmp_path / "step_00000001"
    with pytest.raises(CheckpointError, match="step_00000002"):
        read_state(path)


def test_writing_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    fill(store, 5, "old")
    path = fill(store, 5, "new weights")
    assert (path / "actor" / "model.bin").read_text() == "new weights"
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000005"]


WRITER = """
import sys, time
from pathlib import Path
from rlsdk.trainer.checkpoint import CheckpointStore
store = CheckpointStore(Path(sys.argv[1]), keep=2)
for step in range(1, 10_000):
    with store.write(step, {"step": step}) as folder:
        for part in range(5):
            (folder / f"part{part}").write_bytes(bytes([step % 251]) * 20_000)
    print(step, flush=True)
"""


@pytest.mark.parametrize("steps_first", [1, 2, 4, 7])
def test_kill_9_at_any_moment_leaves_a_whole_newest_checkpoint(tmp_path: Path, steps_first: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(steps_first):
        last_told = int(process.stdout.readline())
    time.sleep(0.001 * steps_first)
    os.kill(process.pid, signal.SIGKILL)
    last_told = max([last_told, *(int(line) for line in process.stdout.read().split())])
    process.stdout.close()
    process.wait()
    store = CheckpointStore(tmp_path, keep=2)
    newest = store.newest()
    assert newest is not None
    step = read_state(newest)["step"]
    assert step in (last_told, last_told + 1)
    assert {(newest / f"part{n}").read_bytes() for n in range(5)} == {bytes([step % 251]) * 20_000}
    fill(store, step + 1)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_the_manifest_names_every_file_with_its_size(tmp_path: Path) -> None:
    path = fill(CheckpointStore(tmp_path, keep=1), 1)
    assert json.loads((path / MANIFEST).read_text())["files"] == {"actor/model.bin": 7}
