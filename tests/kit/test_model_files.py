"""Files of a model that are not whole: found by names, sizes and headers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlsdk.kit.files.export import copy_unchanged
from rlsdk.kit.files.model_files import INDEX, WEIGHTS, tokenizer_fault, weights_fault

TENSORS = {"a": torch.zeros(4, 8), "b": torch.ones(3, dtype=torch.bfloat16), "c": torch.tensor(True)}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / WEIGHTS, metadata={"format": "pt"})
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}\n')
    return tmp_path


def test_what_is_whole_has_no_fault(folder: Path) -> None:
    assert weights_fault(folder) == ""
    assert tokenizer_fault(folder) == ""
    for dtype in (torch.float8_e4m3fn, torch.float64, torch.int32):
        save_file({"x": torch.zeros(2, 3).to(dtype)}, folder / WEIGHTS)
        assert weights_fault(folder) == ""
    save_file({}, folder / WEIGHTS)
    assert weights_fault(folder) == ""


@pytest.mark.parametrize("target", ["secret", "/dev/zero", None])
def test_a_tokenizer_that_leads_out_of_its_folder_is_not_copied_into_exports(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, target: str | None
) -> None:
    outside, made = tmp_path_factory.mktemp("outside"), tmp_path_factory.mktemp("made")
    (outside / "secret").write_text("key")
    if target is None:
        os.mkfifo(folder / "tokenizer.model")
    else:
        (folder / "tokenizer.model").symlink_to(outside / target)
    assert tokenizer_fault(folder).startswith("tokenizer.model is a")
    copy_unchanged(str(folder), made)
    assert [path.name for path in made.iterdir()] == ["tokenizer.json"]


def changed(header: dict[str, object], rest: bytes) -> bytes:
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + rest


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda raw: b"", "is empty; copy or download it again"),
        (lambda raw: raw[:-7], "is cut short: "),
        (lambda raw: raw[:40], "is cut short: 40 bytes of a header of "),
        (lambda raw: raw[:5], "is no safetensors file"),
        (lambda raw: raw + b"\0", "where its header says"),
        (lambda raw: b"PK\x03\x04" + raw, "is no safetensors file"),
        (lambda raw: raw[:8] + b"x" + raw[9:], "its header cannot be read"),
        (lambda raw: POINTER, "is a pointer of Git LFS, not the weights themselves: run `git lfs pull`"),
        (lambda raw: changed({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, bytes(8)), "shape of 'a'"),
        (lambda raw: changed({"a": {"dtype": "F32"}}, b""), "its header cannot be read"),
        (lambda raw: changed({"a": 3}, b""), "its header cannot be read"),
        (lambda raw: b"\x02" + bytes(7) + b"[]", "its header cannot be read"),
    ],
)
def test_weights_that_are_damaged(folder: Path, damage: object, said: str) -> None:
    assert callable(damage)
    file = folder / WEIGHTS
    file.write_bytes(damage(file.read_bytes()))
    found = weights_fault(folder)
    assert found.startswith(WEIGHTS)
    assert said in found


def test_weights_that_are_not_there_or_of_another_kind(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    found = weights_fault(folder)
    assert f"holds neither {WEIGHTS} nor {INDEX}; it has pytorch_model.bin" in found
    assert "save_pretrained" in found


def test_every_file_of_an_index_is_looked_at(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "model-1.safetensors")
    save_file({"d": torch.zeros(2)}, folder / "model-2.safetensors")
    placed = {**dict.fromkeys(TENSORS, "model-1.safetensors"), "d": "model-2.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": placed}))
    assert weights_fault(folder) == ""
    (folder / INDEX).write_text(json.dumps({"weight_map": {**placed, "e": "model-2.safetensors"}}))
    assert weights_fault(folder).startswith("model-2.safetensors lacks 1 of the tensors that")
    (folder / INDEX).write_text(json.dumps({"weight_map": {**placed, "e": "model-3.safetensors"}}))
    assert f"{INDEX} names model-3.safetensors, which is not there" in weights_fault(folder)
    for wrong in ("", "[]", "{}", '{"weight_map": [1]}'):
        (folder / INDEX).write_text(wrong)
        assert f"{INDEX} is no index" in weights_fault(folder)


def test_a_tokenizer_that_is_not_there_or_damaged(folder: Path) -> None:
    file = folder / "tokenizer.json"
    for text, said in (
        ("", "is empty"),
        ('{"a": ', "is cut short"),
        ("[]", "no JSON object"),
        (POINTER.decode(), "Git LFS"),
    ):
        file.write_text(text)
        assert said in tokenizer_fault(folder)
    file.unlink()
    assert "holds no tokenizer" in tokenizer_fault(folder)
    assert "--model.tokenizer FOLDER" in tokenizer_fault(folder)
    for name in ("spiece.model", "vocab.txt", "qwen.tiktoken", "tekken.json", "tokenizer_config.json"):
        (folder / name).write_text("x")
        assert tokenizer_fault(folder) == ""
        (folder / name).unlink()


def test_torch_is_not_imported_for_it() -> None:
    code = "import sys, rlsdk.kit.files.model_files; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
