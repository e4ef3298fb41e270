"""The server of `rlsdk watch`: for this machine, under its own name, of one page."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlsdk.interfaces import ConfigError
from rlsdk.system.bounded_http import ConnectionLimits
from rlsdk.views.report.live import LOOPBACK, LivePage, LiveServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    (tmp_path / "run").mkdir()
    with LiveServer(LivePage(tmp_path / "run")) as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def ask(server: LiveServer, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(LOOPBACK, server.server_address[1], timeout=20)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_a_page_that_was_opened_before_the_first_step_follows_the_run(server: LiveServer) -> None:
    status, page = ask(server, "/")
    assert (status, "No step is done yet" in page) == (200, True)
    asks, mark = re.search('data-live="([^"]+)" data-mark="([^"]+)"', page).groups()  # type: ignore[union-attr]
    assert ask(server, f"{asks}?after={mark}")[0] == 304
    file = server.page.run_dir / "metrics.jsonl"
    file.write_text('{"step": 1, "reward/mean": 0.5}\n')
    status, text = ask(server, f"{asks}?after={mark}")
    news = json.loads(text)
    assert status == 200
    assert news["data"]["steps"] == [1]
    assert "<h2>Curves</h2>" in news["main"]
    assert ask(server, f"{asks}?after={news['mark']}")[0] == 304
    assert sorted(path.name for path in server.page.run_dir.iterdir()) == ["metrics.jsonl"]  # nothing was written


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "", "127.0.0.1", "localhost:1", "127.0.0.1.nip.io"]
)
def test_a_request_under_another_name_is_refused(server: LiveServer, host: str) -> None:
    for path in ("/", "/news"):
        status, text = ask(server, path, Host=host)
        assert (status, "its own address" in text) == (403, True)


def test_its_own_names_are_answered_and_other_sites_are_not(server: LiveServer) -> None:
    port = server.server_address[1]
    assert ask(server, "/", Host=f"LOCALHOST:{port}")[0] == 200
    assert ask(server, "/", Sec_Fetch_Site="same-origin")[0] == 200
    for site in ("cross-site", "same-site"):
        assert ask(server, "/news", Sec_Fetch_Site=site)[0] == 403


def test_there_is_one_page_and_it_can_only_be_read(server: LiveServer) -> None:
    (server.page.run_dir / "config.yaml").write_text("secret: 1")
    for path in ("/config.yaml", "/../run/config.yaml", "//config.yaml", "/%2e%2e/config.yaml"):
        assert ask(server, path)[0] == 404
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(server, "/", method=method)[0] == 501
    assert server.server_address[0] == "127.0.0.1"


def test_a_folder_that_is_not_there_and_a_port_that_is_taken_are_refused(server: LiveServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not the folder of a run.*rlsdk watch"):
        LivePage(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"--port \d+: cannot listen there"):
        LiveServer(server.page, server.server_address[1])


def test_the_command_says_where_and_ctrl_c_ends_it_quietly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rlsdk", "watch", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.stdout.readline()
        found = re.match(r"http://127\.0\.0\.1:(\d+)/  shows", line)
        assert found, line
        connection = http.client.HTTPConnection(LOOPBACK, int(found[1]), timeout=20)
        connection.request("GET", "/")
        assert connection.getresponse().status == 200
        connection.close()
        os.kill(process.pid, signal.SIGINT)
        try:
            _, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert (process.returncode, errors) == (0, "")


def test_a_client_that_trickles_is_cut_and_holds_no_page_back(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with LiveServer(LivePage(tmp_path / "run")) as server:
        server.limits = ConnectionLimits(transfer_s=0.5, connections=4)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            clients = [socket.create_connection((LOOPBACK, server.server_address[1]), timeout=20) for _ in range(12)]
            for client in clients:
                client.sendall(b"GET / HTTP/1.1\r\n")
            assert ask(server, "/")[0] == 200
            began = time.monotonic()
            for client in clients:
                while time.monotonic() - began < 20 and not is_closed(client):
                    time.sleep(0.05)
                client.close()
            assert time.monotonic() - began < 5
        finally:
            server.shutdown()
            thread.join()


def is_closed(client: socket.socket) -> bool:
    try:
        client.sendall(b"x")
        client.settimeout(0.01)
        return client.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def test_an_unexpected_error_of_a_page_answers_500_and_is_logged(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def whole() -> str:
        raise LookupError("nobody expected this")

    monkeypatch.setattr(server.page, "whole", whole)
    status, text = ask(server, "/")
    assert (status, text) == (500, "unexpected LookupError; the log of this server has the details\n")
    assert "LookupError: nobody expected this" in caplog.text


def test_the_page_says_where_the_logs_are(server: LiveServer) -> None:
    (server.page.run_dir / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    (server.page.run_dir / "logs").mkdir()
    assert f"<dt>logs</dt><dd>{server.page.run_dir}/logs</dd>" in ask(server, "/")[1]


def test_a_page_with_text_that_cannot_be_encoded_is_shown(server: LiveServer) -> None:
    (server.page.run_dir / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    (server.page.run_dir / "samples.jsonl").write_text(
        json.dumps({"step": 1, "prompt": "p\ud800", "response": "\udfff r", "score": 1.0}) + "\n"
    )
    assert ask(server, "/")[0] == 200
    assert ask(server, "/news?after=x")[0] == 200
