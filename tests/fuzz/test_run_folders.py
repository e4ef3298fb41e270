"""Whatever became of a run's folder, its report is written and its newest whole checkpoint found, or an error says why
not."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from conftest import FUZZ
from hypothesis import given
from hypothesis import strategies as st

from rlsdk.interfaces import CheckpointError, RlsdkError
from rlsdk.trainer.checkpoints.checkpoint import CheckpointStore, damage, read_state
from rlsdk.trainer.tracking.trackers import JsonlTracker, TrackerContext, read_lines
from rlsdk.views.report import write_report

JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.just("<script>alert(1)</script>")
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=5,
)
NAMES = st.sampled_from(["step", "reward/mean", "sft/loss", "prompt", "response", "score"]) | st.text(max_size=5)
HURTS = st.sampled_from(["flip", "cut", "longer", "zeros", "gone", "folder"])
LINES = st.lists(
    st.one_of(
        st.binary(max_size=40),
        JSON.map(lambda value: json.dumps(value).encode()),
        st.dictionaries(NAMES, JSON, max_size=4).map(lambda value: json.dumps(value).encode()),
        st.integers(0, 9).map(lambda step: json.dumps({"step": step, "reward/mean": step / 7}).encode()),
    ),
    max_size=8,
)  # fmt: skip


@FUZZ
@given(metrics=LINES, samples=LINES, config=st.binary(max_size=60))
def test_a_report_of_any_lines(
    tmp_path: Path, tried: Callable[[str], None], metrics: list[bytes], samples: list[bytes], config: bytes
) -> None:
    tried("metrics.jsonl and samples.jsonl of any lines")
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(metrics))
    (tmp_path / "samples.jsonl").write_bytes(b"\n".join(samples))
    (tmp_path / "config.yaml").write_bytes(config)
    try:
        page, plot = write_report(tmp_path)
    except RlsdkError as error:
        assert str(tmp_path) in str(error) or "metrics" in str(error)  # noqa: PT017
        return
    assert len(re.findall("<script", page.read_text(encoding="utf-8"), re.IGNORECASE)) == 3  # its data and its own two
    ElementTree.parse(plot)


@FUZZ
@given(lines=LINES, step=st.integers(0, 9))
def test_a_run_resumes_over_any_lines(
    tmp_path: Path, tried: Callable[[str], None], lines: list[bytes], step: int
) -> None:
    """No whole line of before the checkpoint is lost, none behind it is kept."""
    tried("metrics that a run is resumed over")
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b"\n".join(lines))
    kept = [line for line in read_lines(file) if line["step"] <= step and not any(k.startswith("sft/") for k in line)]
    tracker = JsonlTracker(TrackerContext(run_dir=str(tmp_path), run_name="r", config={}, resume_step=step))
    tracker.log(step + 1, {"reward/mean": 1.0})
    tracker.close()
    found = [line for line in read_lines(file) if not any(k.startswith("sft/") for k in line)]
    assert json.dumps(found) == json.dumps([*kept, {"step": step + 1, "reward/mean": 1.0}])


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = CheckpointStore(tmp_path_factory.mktemp("run") / "checkpoints", keep=3)
    for step in (2, 4, 6):
        with store.write(step, {"trainer": {"step": step}, "prompts": {"epoch": step}}) as folder:
            (folder / "actor").mkdir()
            (folder / "actor" / "weights.safetensors").write_bytes(os.urandom(600))
            (folder / "actor" / "state.json").write_text('{"format": 1}')
    return store.folder


def hurt(file: Path, how: str, data: st.DataObject) -> None:
    """One thing that disks, people and interrupted copies do to a file."""
    content = file.read_bytes()
    at = data.draw(st.integers(0, max(len(content) - 1, 0)))
    match how:
        case "flip" if content:
            file.write_bytes(
                content[:at] + bytes([content[at] ^ 1 << data.draw(st.integers(0, 7))]) + content[at + 1 :]
            )
        case "cut" if content:
            file.write_bytes(content[:at])
        case "longer":
            file.write_bytes(content + data.draw(st.binary(min_size=1, max_size=5)))
        case "zeros" if content:
            file.write_bytes(bytes(len(content)))
        case "gone":
            file.unlink()
        case "folder":
            file.unlink()
            file.mkdir()


@FUZZ
@given(data=st.data())
def test_damaged_checkpoints(
    checkpoints: Path, tmp_path: Path, tried: Callable[[str], None], data: st.DataObject
) -> None:
    """The newest that is whole is taken, the damaged ones before it are named; with none there is an error."""
    tried("folders of checkpoints, damaged")
    folder = tmp_path / "checkpoints"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(checkpoints, folder)
    before = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    for _ in range(data.draw(st.integers(0, 4))):
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        if files:
            hurt(data.draw(st.sampled_from(files)), data.draw(HURTS), data)
    steps = {path: path.relative_to(folder).parts[0] for path in before}
    broken = {steps[path] for path, content in before.items() if not path.is_file() or path.read_bytes() != content}
    whole = [step for step in (6, 4, 2) if f"step_{step:08d}" not in broken]
    told: list[str] = []
    try:
        newest = CheckpointStore(folder, 3).newest_intact(told.append)
    except CheckpointError as error:
        assert not whole, f"{error}: but {whole} are as they were"  # noqa: PT017
        return
    if newest is None:
        assert not whole
        return
    assert newest.name == f"step_{whole[0]:08d}"
    assert damage(newest) == []
    assert read_state(newest)["trainer"]["step"] == whole[0]
    newer = sorted(name for name in broken if name > newest.name)
    assert all(any(name in line for line in told) for name in newer), (newer, told)
