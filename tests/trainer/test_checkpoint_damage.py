"""Any changed byte of a checkpoint is seen, in any file, and no manifest makes the reader hang or fail otherwise."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from rlsdk.interfaces import CheckpointError
from rlsdk.trainer.checkpoints import manifest as manifests
from rlsdk.trainer.checkpoints.checkpoint import MANIFEST, BestRecord, CheckpointStore, damage, faults, read_state

STATE = {"trainer": {"step": 7, "rate": 1e-05, "name": "ä"}, "prompts": {"epoch": 1}, "first_eval": {"x": float("nan")}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = CheckpointStore(tmp_path_factory.mktemp("run") / "checkpoints", keep=2)
    with store.write(7, STATE) as folder:
        (folder / "actor").mkdir()
        save_file({"weight/a": torch.randn(40, 7), "exp_avg/a": torch.randn(40, 7)}, folder / "actor" / "s.safetensors")
        (folder / "actor" / "state.json").write_text('{"format": 1, "num_steps": 3}')
        (folder / "config.yaml").write_text("trainer:\n  steps: 5\n")
        (folder / "empty").touch()
    return store.folder / "step_00000007"


@contextmanager
def changed(file: Path, content: bytes) -> Iterator[None]:
    before = file.read_bytes()
    file.write_bytes(content)
    try:
        yield
    finally:
        file.write_bytes(before)


def seen(checkpoint: Path) -> bool:
    """By what a run asks before it loads one; every other outcome than a refusal by name is an error here."""
    with pytest.raises(CheckpointError, match=checkpoint.name):
        CheckpointStore(checkpoint.parent, 2).newest_intact(pytest.fail)
    return True


def test_an_untouched_checkpoint_is_whole(checkpoint: Path) -> None:
    assert damage(checkpoint) == []
    assert json.dumps(read_state(checkpoint)) == json.dumps(STATE)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_flipped_bit_is_seen_wherever_it_is(checkpoint: Path, data: st.DataObject) -> None:
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.stat().st_size)
    file = data.draw(st.sampled_from(files), label="file")
    content = bytearray(file.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1), label="byte")] ^= 1 << data.draw(st.integers(0, 7), label="bit")
    with changed(file, bytes(content)):
        assert seen(checkpoint)
    assert damage(checkpoint) == []


def test_every_single_bit_of_the_manifest_is_seen(checkpoint: Path) -> None:
    file = checkpoint / MANIFEST
    content = file.read_bytes()
    for at in range(len(content)):
        flipped = bytearray(content)
        flipped[at] ^= 1 << (at % 8)
        with changed(file, bytes(flipped)):
            assert faults(checkpoint), f"byte {at}: {flipped[max(at - 20, 0) : at + 20]!r}"


@given(cut=st.integers(0, 2000), more=st.binary(max_size=5))
@settings(max_examples=50, deadline=None)
def test_a_cut_or_longer_manifest_is_seen(checkpoint: Path, cut: int, more: bytes) -> None:
    content = (checkpoint / MANIFEST).read_bytes()
    other = content[: min(cut, len(content) - 1)] + more
    if other != content:
        with changed(checkpoint / MANIFEST, other):
            assert faults(checkpoint)


def test_a_missing_file_is_named_and_an_empty_one_too(checkpoint: Path) -> None:
    for name in ("empty", "actor/state.json"):
        before = (checkpoint / name).read_bytes()
        (checkpoint / name).unlink()
        try:
            assert damage(checkpoint) == [f"{name} is missing"]
        finally:
            (checkpoint / name).write_bytes(before)


def sealed_again(content: object) -> bytes:
    """A manifest whose checksum is right although somebody edited it."""
    return manifests._with_checksum(json.dumps(content, indent=1).encode())


DEEP: Any = 1
for _ in range(300):
    DEEP = [DEEP]
EDITS = [
    ("format", value) for value in (1, 3, "2", None, 2.5, 10**30, [2])
] + [
    ("step", value) for value in (-1, "7", 7.5, None, 10**400, True, 8)
] + [
    ("order", value) for value in (-1, "1", None, 2**60)
] + [
    ("files", value)
    for value in (None, [], "x", {"a": 3}, {"a": {"size": -1, "xxh3": "0" * 32}}, {"a": {"size": 1, "xxh3": "zz"}},
                  {"../secret": {"size": 1, "xxh3": "0" * 32}}, {"/dev/zero": {"size": 0, "xxh3": "0" * 32}},
                  {"a//b": {"size": 1, "xxh3": "0" * 32}}, {"a\0": {"size": 1, "xxh3": "0" * 32}},
                  {"config.yaml": {"size": 1}}, {"a" * 5000: {"size": 1, "xxh3": "0" * 32}}, DEEP)
] + [
    ("state", value) for value in (None, [], "x", 3)
] + [("unknown", 1)]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), EDITS, ids=lambda value: str(value)[:30])
def test_a_manifest_edited_by_hand_is_refused_by_what_is_wrong_with_it(
    checkpoint: Path, field: str, value: object
) -> None:
    content = json.loads((checkpoint / MANIFEST).read_bytes())
    del content["checksum"]
    content[field] = value
    with changed(checkpoint / MANIFEST, sealed_again(content)):
        assert seen(checkpoint)


@pytest.mark.parametrize("field", ["format", "step", "order", "files", "state"])
def test_a_manifest_without_a_field_is_refused(checkpoint: Path, field: str) -> None:
    content = json.loads((checkpoint / MANIFEST).read_bytes())
    del content["checksum"], content[field]
    with changed(checkpoint / MANIFEST, sealed_again(content)):
        assert any(field in problem for problem in faults(checkpoint))


@pytest.mark.parametrize("text", ["", "null", "[]", "7", "{", "[" * 100_000, '{"format": ' + "9" * 6000 + "}", "\x00"])
def test_what_is_no_manifest_at_all_is_refused(checkpoint: Path, text: str) -> None:
    with changed(checkpoint / MANIFEST, text.encode()):
        assert seen(checkpoint)


def test_a_pipe_in_place_of_a_file_does_not_block(checkpoint: Path) -> None:
    for name in (MANIFEST, "config.yaml"):
        file = checkpoint / name
        before = file.read_bytes()
        file.unlink()
        os.mkfifo(file)
        try:
            assert faults(checkpoint)
        finally:
            file.unlink()
            file.write_bytes(before)


def test_an_earlier_format_is_named(checkpoint: Path) -> None:
    old = {"format": 1, "step": 7, "files": {"config.yaml": 20}, "state": {}}
    with changed(checkpoint / MANIFEST, json.dumps(old).encode()):
        assert faults(checkpoint) == [f"{MANIFEST} has format '1'; this rlsdk reads format 2"]


def test_no_flipped_bit_of_the_best_record_names_another_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=9)
    for step in (1, 2, 3):
        with store.write(step, {}):
            pass
    best = BestRecord(step=2, metric="eval/accuracy", mode="max", value=0.5)
    store.mark_best(best)
    assert store.best() == best
    raw = (tmp_path / "best.json").read_bytes()
    for at in range(len(raw) * 8):
        changed = bytearray(raw)
        changed[at // 8] ^= 1 << at % 8
        (tmp_path / "best.json").write_bytes(changed)
        assert store.best() in (None, best)
