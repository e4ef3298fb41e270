"""A checkpoint is whole or absent, whatever happens while it is written."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import xxhash

from rlsdk.interfaces import CheckpointError
from rlsdk.trainer.checkpoints.checkpoint import MANIFEST, CheckpointStore, faults, older_whole, read_state


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


def test_the_newest_model_is_kept_and_found_where_not_every_checkpoint_holds_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in range(1, 8):
        with store.write(step, {}) as folder:
            (folder / "weights").write_text("w")
            if step in (2, 4):
                (folder / "model").mkdir()
                (folder / "model" / "config.json").write_text("{}")
    assert [step for step, _ in store.whole()] == [4, 6, 7]
    assert store.newest_intact(print, "model") == store.path_of(4)
    assert store.newest_intact(print) == store.path_of(7)


def test_a_damaged_model_is_not_passed_over_in_silence(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    for step in (1, 2):
        with store.write(step, {}) as folder:
            (folder / "model").mkdir()
            (folder / "model" / "config.json").write_text("{}")
    (store.path_of(2) / "model" / "config.json").write_text("{ }")
    told: list[str] = []
    assert store.newest_intact(told.append, "model") == store.path_of(1)
    assert "step_00000002" in told[0]


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
from rlsdk.trainer.checkpoints.checkpoint import CheckpointStore
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


REWRITER = """
import sys
from pathlib import Path
from rlsdk.trainer.checkpoints.checkpoint import CheckpointStore
store = CheckpointStore(Path(sys.argv[1]), keep=1)
for round in range(100_000):
    with store.write(7, {"round": round}) as folder:
        (folder / "part").write_bytes(bytes([round % 251]) * 5_000)
    print(round, flush=True)
"""


@pytest.mark.parametrize("rounds_first", [1, 3, 6, 10])
def test_kill_9_while_one_step_is_written_again_and_again_leaves_one_of_its_copies(
    tmp_path: Path, rounds_first: int
) -> None:
    process = subprocess.Popen([sys.executable, "-c", REWRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(rounds_first):
        last_told = int(process.stdout.readline())
    time.sleep(0.0007 * rounds_first)
    os.kill(process.pid, signal.SIGKILL)
    last_told = max([last_told, *(int(line) for line in process.stdout.read().split())])
    process.stdout.close()
    process.wait()
    store = CheckpointStore(tmp_path, keep=1)
    store.recover()
    newest = store.newest_intact(pytest.fail)
    assert newest == tmp_path / "step_00000007"
    found = read_state(newest)["round"]
    assert found in (last_told, last_told + 1)
    assert (newest / "part").read_bytes() == bytes([found % 251]) * 5_000


def test_the_manifest_names_every_file_with_its_size(tmp_path: Path) -> None:
    path = fill(CheckpointStore(tmp_path, keep=1), 1)
    sealed = json.loads((path / MANIFEST).read_text())["files"]
    assert sealed == {"actor/model.bin": {"size": 7, "xxh3": xxhash.xxh3_128_hexdigest(b"weights")}}


def test_an_attempt_that_starts_anew_keeps_its_own_checkpoint_and_not_the_higher_step_of_an_earlier_one(
    tmp_path: Path,
) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    fill(store, 100, "earlier attempt")
    path = fill(store, 5, "this attempt")
    assert store.whole() == [(5, path)]
    assert store.newest() == path
    assert store.newest_intact(pytest.fail) == path


def test_what_was_written_last_is_newest_whatever_its_step(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    for step in (10, 20, 5, 15):
        fill(store, step)
    assert [step for step, _ in store.whole()] == [20, 5, 15]


@pytest.mark.parametrize("moment", ["old copy renamed away", "new copy in place"])
def test_a_kill_while_a_step_is_rewritten_loses_neither_copy(tmp_path: Path, moment: str) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    path = fill(store, 5, "old")
    if moment == "old copy renamed away":
        path.rename(tmp_path / ".step_00000005.old")
        (tmp_path / ".step_00000005.tmp").mkdir()
    else:
        shutil.copytree(path, tmp_path / ".step_00000005.old")
    newest = store.newest()
    assert newest is not None
    assert (newest / "actor" / "model.bin").read_text() == "old"
    store.recover()
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000005"]
    assert store.newest() == path
    assert (fill(store, 6, "next") / "actor" / "model.bin").read_text() == "next"


def test_a_write_that_fails_leaves_no_draft(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    with pytest.raises(RuntimeError, match="engine"):
        fail(store, 2)
    assert list(tmp_path.iterdir()) == []


def test_the_newest_damaged_one_is_named_when_an_older_one_is_taken(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    older = fill(store, 1)
    (fill(store, 2) / "actor" / "model.bin").write_text("wEights")
    (fill(store, 3) / MANIFEST).write_text("{}")
    said: list[str] = []
    assert store.newest_intact(said.append) == older
    assert len(said) == 2
    assert "step_00000003" in said[0]
    assert "step_00000002" in said[1]
    assert "actor/model.bin is damaged: its checksum differs" in said[1]
    (older / "actor" / "model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged: .*step_00000003.*step_00000001.*"):
        store.newest_intact(said.append)


def test_listing_reads_no_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    path = fill(store, 1)
    monkeypatch.setattr("rlsdk.trainer.checkpoints.manifest._hash", lambda file: pytest.fail(f"read {file}"))
    assert store.newest() == path
    assert faults(path) == []


def test_a_refused_checkpoint_comes_with_the_others_beside_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    first, second = fill(store, 1), fill(store, 2)
    assert str(first) in older_whole(second)
    assert str(second) not in older_whole(second)
    assert "no other complete checkpoint" in older_whole(fill(CheckpointStore(tmp_path / "alone", 1), 1))
