"""The plain models of the kit come from local folders: nothing is fetched, and no code of a folder runs."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.utils import build_hf_headers

from rlsdk.interfaces import Head
from rlsdk.testing.process.models import write_tiny_model
from rlsdk.testing.process.reference import load_plain_model
from rlsdk.testing.train.cases import Case
from rlsdk.testing.train.lab import write_headed_model
from rlsdk.testing.train.plain_steps import plain_model_of
from rlsdk.testing.train.requirements.exports import ill_fitting

LOADERS: dict[str, Callable[[str, Path], Any]] = {
    "plain model": lambda path, folder: load_plain_model(path),
    "plain steps": lambda path, folder: plain_model_of(Case(model=path)),
    "exports": lambda path, folder: ill_fitting(Path(path), Head.LM),
    "headed model": lambda path, folder: write_headed_model(path, folder / "headed"),
}
CODE = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
from transformers import PretrainedConfig
class OwnConfig(PretrainedConfig):
    model_type = "own"
"""


@pytest.mark.parametrize("name", LOADERS)
def test_code_in_a_model_folder_does_not_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # the prompt for `trust_remote_code`
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = write_tiny_model(tmp_path / "model", layers=1)
    (folder / "own.py").write_text(CODE)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="trust_remote_code"):
        LOADERS[name](str(folder), tmp_path)
    assert not list(tmp_path.rglob("ran"))


@pytest.mark.parametrize("name", LOADERS)
def test_a_name_that_is_no_folder_is_not_looked_up(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def resolve(host: object, *_: object, **__: object) -> None:
        asked.append(host)
        raise OSError("no network in this test")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    build_hf_headers()  # asks the hub once which programs call it, and names no model
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(OSError, match="cached files"):
        LOADERS[name]("no-such-owner/no-such-model", tmp_path)
    assert asked == []
