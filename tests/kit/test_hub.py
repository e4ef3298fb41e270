"""Models of the hub, asked of a small server that answers as the hub does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

CONFIG = json.dumps({"model_type": "qwen2", "num_attention_heads": 14}).encode()
ANSWERS = {
    "/org/good/resolve/main/config.json": (200, "", CONFIG),
    "/org/gated/resolve/main/config.json": (403, "GatedRepo", b""),
    "/org/bare/resolve/main/config.json": (404, "EntryNotFound", b""),
    "/org/good/resolve/v9/config.json": (404, "RevisionNotFound", b""),
    "/org/odd/resolve/main/config.json": (200, "", b"[1]"),
}
ASK = """
import sys
from rlsdk.interfaces import ConfigError
from rlsdk.kit.files.hub import fetch_model_config

name, _, revision = sys.argv[1].partition("@")
try:
    print(fetch_model_config(name, revision or None, field=sys.argv[2]))
except ConfigError as error:
    print(error)
"""


class Hub(BaseHTTPRequestHandler):
    """HEAD and GET of single files."""

    def do_HEAD(self) -> None:
        status, error, body = ANSWERS.get(self.path, (404, "RepoNotFound", b""))
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"1"')
        self.send_header("X-Repo-Commit", "0" * 40)
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        self.wfile.write(ANSWERS.get(self.path, (404, "", b""))[2])

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def ask(endpoint: str, home: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("HF_HUB_OFFLINE", "HF_TOKEN")}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home)}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=120, env=environment, check=False
    )


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("org/none", "no such model on the hub"),
        ("org/gated", "hf auth login"),
        ("org/bare", "without a config.json"),
        ("org/good@v9", "ref.revision 'v9'"),
        ("org/odd", "has no model_type"),
    ],
)
def test_what_the_hub_does_not_give_is_said(hub: str, tmp_path: Path, model: str, said: str) -> None:
    done = ask(hub, tmp_path, ["-c", ASK, model, "ref.path"])
    assert said in done.stdout, done.stderr
    assert done.stdout.startswith("ref.")
    assert model.partition("@")[0] in done.stdout


def test_a_config_is_read_once_and_then_found_without_the_hub(hub: str, tmp_path: Path) -> None:
    for endpoint in (hub, "http://127.0.0.1:9"):
        done = ask(endpoint, tmp_path, ["-c", ASK, "org/good", "model.path"])
        assert "'num_attention_heads': 14" in done.stdout, done.stderr


def test_a_model_that_cannot_be_had_is_refused_before_a_run_has_a_folder(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "1+1", "answer": "2"}\n')
    command = ["-m", "rlsdk.cli", "train", "--model", "org/good", "--data", str(data), "--reward", "math"]
    done = ask("http://127.0.0.1:9", tmp_path / "home", [*command, "--trainer.run_dir", str(runs)])
    assert done.returncode == 2
    assert "model.path 'org/good': no such folder here" in done.stderr
    assert "the hub cannot be reached" in done.stderr
    assert not runs.exists()
