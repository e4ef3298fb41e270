"""A model to the hub: what is sent, to whom, and what never is. The hub is a server of this test."""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlsdk.cli import main
from rlsdk.cli.models.push import prepare
from rlsdk.config import RunConfig
from rlsdk.interfaces import ConfigError
from rlsdk.trainer.checkpoints.checkpoint import CheckpointStore
from rlsdk.trainer.stages.model_card import model_card, with_licence

SECRET = "not-for-others"


class Hub(BaseHTTPRequestHandler):
    """The four calls of the hub that a commit of small files makes."""

    asked: list[tuple[str, Any]]
    refuses = False

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers["Content-Length"]))
        lines = [json.loads(line) for line in text.splitlines()] if b"\n" in text else json.loads(text)
        type(self).asked.append((self.path, lines))
        if self.refuses:
            self.answer(403, {"error": "no rights"})
        elif self.path == "/api/repos/create":
            self.answer(200, {"url": "https://huggingface.co/me/model"})
        elif "/preupload/" in self.path:
            files = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in lines["files"]]
            self.answer(200, {"files": files})
        elif "/commit/" in self.path:
            self.answer(200, {"success": True, "commitOid": "1" * 40, "hookOutput": "",
                              "commitUrl": "https://huggingface.co/me/model/commit/1"})  # fmt: skip
        else:
            self.answer(200, {"errors": [], "warnings": []})

    def do_GET(self) -> None:
        self.answer(200, {"id": "me/model", "sha": "0" * 40, "siblings": [], "private": False})

    def answer(self, status: int, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    kind = type("OwnHub", (Hub,), {"asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
        monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", url)
        monkeypatch.setenv("HF_TOKEN", "hf_test")
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        yield kind
        server.shutdown()
        thread.join()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text(model_card(RunConfig(), step=3))
    for name in ("optimizer.pt", "state.json", ".env", "config.yaml", "notes.txt"):
        (folder / name).write_text(SECRET)
    (folder / "tokenizer_link.json").symlink_to(folder / ".env")
    return folder


def code_of(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    return int(left.value.code or 0)


def test_what_is_sent_is_the_model_and_its_card_and_nothing_else(model: Path, hub: type[Hub]) -> None:
    assert code_of(["push", str(model), "me/model", "--license", "apache-2.0"]) == 0
    calls = dict(hub.asked)
    made = calls["/api/repos/create"]
    assert made.get("private") is True or made.get("visibility") == "private", made
    [commit] = [lines for path, lines in hub.asked if "/commit/" in path]
    sent = {
        line["value"]["path"]: base64.b64decode(line["value"]["content"]) for line in commit if line["key"] == "file"
    }
    assert sorted(sent) == ["README.md", "config.json", "model.safetensors", "tokenizer.json"]
    assert sent["model.safetensors"] == b"weights"
    assert yaml.safe_load(sent["README.md"].decode().split("---")[1])["license"] == "apache-2.0"
    assert SECRET not in str(sent)


@pytest.mark.parametrize("name", ["README.md", "config.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["link", "link to nothing", "hard link", "pipe", "device"])
def test_a_link_a_pipe_or_a_device_in_place_of_a_file_is_refused(
    model: Path, hub: type[Hub], capsys: pytest.CaptureFixture[str], name: str, kind: str
) -> None:
    file = model / name
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "hard link":
        file.hardlink_to(model / ".env")
    else:
        file.symlink_to({"link": model / ".env", "link to nothing": model / "nothing", "device": "/dev/zero"}[kind])
    assert code_of(["push", str(model), "me/model"]) == 2
    said = capsys.readouterr()
    assert hub.asked == []
    assert str(file) in said.err or name == "config.json"  # without one it is no model
    assert SECRET not in said.out + said.err


def test_a_file_that_is_left_out_is_named(model: Path, hub: type[Hub], capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(["push", str(model), "me/model", "--dry-run"]) == 0
    said = capsys.readouterr()
    assert f"not sent: '{model / 'tokenizer_link.json'}' is a symbolic link" in said.err
    assert "tokenizer_link.json" not in said.out


def test_a_folder_of_a_run_that_is_a_link_is_refused_with_the_folder_to_give(
    model: Path, tmp_path: Path, hub: type[Hub], capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    (run / "checkpoints" / "step_00000001").mkdir(parents=True)
    elsewhere = model.rename(tmp_path / "elsewhere")
    (elsewhere / "tokenizer_link.json").unlink()
    with CheckpointStore(tmp_path / "other", 1).write(1, {}) as draft:
        shutil.copytree(elsewhere, draft / "model")
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").symlink_to(tmp_path / "other")
    assert code_of(["push", str(run), "me/model"]) == 2
    assert "is a symbolic link" in (said := capsys.readouterr().err)
    assert str(tmp_path / "other" / "step_00000001" / "model") in said
    assert hub.asked == []


def test_a_dry_run_asks_nobody(model: Path, hub: type[Hub], capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(["push", str(model), "me/model", "--dry-run", "--public"]) == 0
    said = capsys.readouterr().out
    assert hub.asked == []
    assert "model.safetensors" in said
    assert "optimizer.pt" not in said
    assert "nothing was sent. Without --dry-run: public model me/model" in said
    assert " kB  config.json" in said
    assert " 0.0 MB" not in said


def test_a_refusal_of_the_hub_is_said_with_the_way_in(
    model: Path, hub: type[Hub], capsys: pytest.CaptureFixture[str]
) -> None:
    hub.refuses = True
    assert code_of(["push", str(model), "me/model"]) == 1
    assert "the hub did not accept me/model" in (said := capsys.readouterr().err)
    assert "hf auth login" in said


def test_a_hub_that_cannot_be_reached_is_a_message(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as nobody:  # listens to nobody
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
        monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", url)
        monkeypatch.setenv("HF_TOKEN", "hf_test")
        assert code_of(["push", str(model), "me/model"]) == 1
    assert "me/model was not sent, because the hub cannot be reached: " in capsys.readouterr().err


@pytest.mark.parametrize("repo", ["model", "a/b/c", "../x", "a b/c", "https://hub/a"])
def test_a_name_that_is_none_is_refused(model: Path, repo: str) -> None:
    with pytest.raises(ConfigError, match="expected org/name"):
        prepare(model, repo, checkpoint=None, licence=None, private=True)


def test_a_folder_without_weights_is_refused(model: Path) -> None:
    (model / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="no weights"):
        prepare(model, "me/model", checkpoint=None, licence=None, private=True)


def card_of(**sections: Any) -> str:
    return model_card(
        RunConfig.model_validate_json(json.dumps(sections)), step=7,
        before={"eval/accuracy_greedy": 0.25, "eval/accuracy_greedy_se": 0.02},
        after={"eval/accuracy_greedy": 0.5, "eval/accuracy_greedy_se": 0.03, "time/eval_s": 3.0},
    )  # fmt: skip


def test_a_card_says_what_was_done_and_nothing_of_the_machine() -> None:
    card = card_of(
        model={"path": "/home/somebody/models/base"}, data={"train": "openai/gsm8k:main"},
        rewards=[{"name": "/home/somebody/mine.py:fn", "options": {"key": SECRET}}], trainer={"seed": 11},
    )  # fmt: skip
    head = yaml.safe_load(card.split("---")[1])
    assert head["datasets"] == ["openai/gsm8k"]
    assert "base_model" not in head
    assert "license" not in head
    assert "somebody" not in card
    assert SECRET not in card
    assert "| accuracy_greedy | 0.25 ± 0.02 | 0.5 ± 0.03 |" in card
    assert "| trainer.seed | 11 |" in card
    assert "after step 7" in card
    assert "eval_s" not in card


def test_names_in_a_card_stay_text() -> None:
    card = card_of(model={"path": "a/b"}, data={"train": "x|y\n---\n<script>alert(1)</script>"})
    assert "<script" not in card
    assert card.count("\n---\n") == 1
    assert yaml.safe_load(card.split("---")[1])["base_model"] == "a/b"
    twice = with_licence(with_licence(card, "mit"), "other: x")
    assert yaml.safe_load(twice.split("---")[1])["license"] == "other: x"
    assert twice.count("`other: x`") == 1
