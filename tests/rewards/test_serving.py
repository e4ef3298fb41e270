"""`rlsdk reward serve`: a reward behind HTTP gives what it gives in a run, and refuses what it must."""

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
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlsdk.interfaces import ConfigError, RewardSample, RlsdkError
from rlsdk.rewards import RewardDef, RewardLimits, RewardRunner
from rlsdk.rewards.services.http_client import RemoteOptions
from rlsdk.rewards.services.remote import RemoteScorer
from rlsdk.rewards.services.server import RewardServer, ServeOptions, is_loopback

HERE = Path(__file__).parent


@contextmanager
def served(function: str, file: str = "recording.py", **options: Any) -> Iterator[RewardServer]:
    reward = RewardDef(name="it", target=f"{HERE / file}:{function}")
    with RewardRunner([reward], RewardLimits(timeout_s=2.0), is_whole=False) as runner:
        server = RewardServer(runner, ServeOptions(port=0, **options))
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            yield server
        finally:
            server.stop()
            thread.join(60)
            assert not thread.is_alive()


@pytest.fixture(scope="module")
def server() -> Iterator[RewardServer]:
    with served("by_token", token="t0ken", max_samples=3, max_request_bytes=5000, timeout_s=0.5) as found:
        yield found


def made(response: str, ids: tuple[int, ...] = (3, 5)) -> RewardSample:
    return RewardSample(prompt="p", response=response, answer=None, row={}, truncated=False, response_ids=ids)


def ask(url: str, responses: list[str], **options: Any) -> Any:
    scorer = RemoteScorer(RewardDef(name="far", target=url), RemoteOptions(**options), RewardLimits())
    try:
        return scorer.submit([made(response) for response in responses]).result(30)
    finally:
        scorer.close()


def test_a_record_goes_both_ways(server: RewardServer) -> None:
    found = ask(server.url, ["a", "b"], send_tokens=True, headers={"Authorization": "Bearer t0ken"})
    assert found.scores.tolist() == [0.5, 0.5]
    assert found.token_scores[1].tolist() == pytest.approx([0.03, 0.05])
    assert found.metrics[0] == {"far/tokens": 2.0, "far/prompt.chars": 3.0}


def test_what_does_not_apply_or_fails_is_said_so() -> None:
    with served("some") as server:
        found = ask(server.url, ["none", "skip", "raise", "else"])
    assert found.graded["far"].tolist() == [False, False, False, True]
    assert found.failures == {"service": 1}
    assert re.search(r"/score: exception: ZeroDivisionError: .*recording.py:\d+\)$", found.examples[0].message)
    assert found.metrics == {1: {"far/skipped": 1.0}}


def test_a_reward_that_dies_or_hangs_costs_its_sample_as_in_a_run() -> None:
    with served("misbehave", "functions.py") as server:
        found = ask(server.url, ["fine", "segfault", "loop", "fine"])
    assert found.scores.tolist() == [0.5, 0.0, 0.0, 0.5]
    messages = [one.message for one in found.examples]
    assert "crash: the process died: signal SIGSEGV" in messages[0]
    assert "timeout: took more than 2.0 s" in messages[1]


def post(server: RewardServer, body: bytes, path: str = "/score", **headers: str) -> tuple[int, dict[str, Any]]:
    host, _, port = server.url.removeprefix("http://").partition("/")[0].rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
    given = {"Authorization": "Bearer t0ken", "Content-Type": "application/json"}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("POST", path, body, given)
    response = connection.getresponse()
    return response.status, json.loads(response.read())


ONE = {"prompt": "p", "response": "r"}


@pytest.mark.parametrize(
    ("body", "headers", "status", "message"),
    [
        ({"samples": []}, {"Authorization": "Bearer wrong"}, 401, "expected Authorization: Bearer TOKEN"),
        ({"samples": []}, {"Authorization": ""}, 401, "expected Authorization"),
        ({"samples": []}, {"Content_Type": "text/plain"}, 415, "expected Content-Type: application/json"),
        ({"samples": []}, {"Content_Length": "-3"}, 411, "expected a Content-Length"),
        ({"samples": [ONE] * 4}, {}, 413, "4 samples; expected at most 3"),
        ({"samples": [{**ONE, "response": "x" * 6000}]}, {}, 413, "more than 5000 bytes"),
        ({"samples": [{"prompt": "p"}]}, {}, 422, "not a request for scores: samples.0.response: Field required"),
        ({"samples": [{**ONE, "respons": ""}]}, {}, 422, "samples.0.respons: Extra inputs are not permitted"),
        ({"samples": [], "version": 2}, {}, 422, "version 2; expected 1"),
        ([], {}, 422, "the body: Input should be an object"),
    ],
)
def test_what_is_no_request_is_refused_with_the_reason(
    server: RewardServer, body: Any, headers: dict[str, str], status: int, message: str
) -> None:
    found = post(server, json.dumps(body).encode(), **headers)
    assert found[0] == status
    assert message in found[1]["error"]


def test_other_paths_are_refused_and_health_is_told_without_a_token(server: RewardServer) -> None:
    assert post(server, b"{}", "/other")[0] == 404
    host, port = server.url.removeprefix("http://").removesuffix("/score").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
    connection.request("GET", "/health")
    response = connection.getresponse()
    assert (response.status, json.loads(response.read())) == (200, {"status": "ok", "reward": "it", "version": 1})


def test_a_client_that_says_nothing_does_not_hold_the_server(server: RewardServer) -> None:
    host, port = server.url.removeprefix("http://").removesuffix("/score").split(":")
    head = b"POST /score HTTP/1.1\r\nAuthorization: Bearer t0ken\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=10) as silent:
        silent.sendall(head + b"Content-Length: 100\r\n\r\n{")
        assert silent.recv(100) == b""


def trickle(server: RewardServer, head: bytes = b"") -> socket.socket:
    """A client that sends a byte now and then, until its connection is closed."""
    client = socket.create_connection(("127.0.0.1", port_of(server)), timeout=10)
    client.sendall(head or b"POST /score HTTP/1.1\r\nX-Slow: ")

    def send() -> None:
        with suppress(OSError):
            while True:
                client.sendall(b"x")
                time.sleep(0.05)

    threading.Thread(target=send, daemon=True).start()
    return client


def port_of(server: RewardServer) -> int:
    return int(server.url.removesuffix("/score").rpartition(":")[2])


def body_head(length: int) -> bytes:
    head = "POST /score HTTP/1.1\r\nAuthorization: Bearer t0ken\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {length}\r\n\r\n".encode()


@pytest.mark.parametrize("head", [b"", body_head(4000)], ids=["headers", "body"])
def test_a_request_has_one_deadline_however_it_trickles(server: RewardServer, head: bytes) -> None:
    began = time.monotonic()
    with trickle(server, head) as client:
        assert client.recv(100) == b""
    assert 0.4 < time.monotonic() - began < 3.0


def test_clients_that_trickle_take_no_place_from_others_and_no_time_at_the_end() -> None:
    with served("length", "functions.py", max_requests=2, max_connections=8, timeout_s=60.0) as server:
        clients = [trickle(server, head) for head in (b"", body_head(4000)) * 10]
        assert ask(server.url, ["abc"]).scores.tolist() == [3.0]
        began = time.monotonic()
    assert time.monotonic() - began < 3.0
    for client in clients:
        client.close()


def test_the_largest_of_too_many_bytes_is_closed_and_others_are_served() -> None:
    with served("length", "functions.py", max_requests=1, max_request_bytes=100_000, timeout_s=60.0) as server:
        large, larger = (trickle(server, body_head(99_000) + b" " * count) for count in (60_000, 70_000))
        assert ask(server.url, ["abc"]).scores.tolist() == [3.0]
        assert larger.recv(1) == b""
        large.settimeout(0.2)
        with pytest.raises(TimeoutError):
            large.recv(1)
        large.close()
        larger.close()


def test_a_request_in_progress_has_a_grace_at_the_end_and_no_more() -> None:
    with served("slow", "functions.py", grace_s=0.5) as server:
        body = json.dumps({"samples": [ONE] * 40}).encode()
        client = socket.create_connection(("127.0.0.1", port_of(server)), timeout=10)
        client.sendall(body_head(len(body)) + body)
        time.sleep(0.3)
        began = time.monotonic()
    assert time.monotonic() - began < 3.0
    assert client.recv(100) == b""
    client.close()


@pytest.mark.parametrize("bad", ["surrogate", "rude", "nan", "huge", "\ud800"])
def test_no_sample_costs_another_its_score(bad: str) -> None:
    with served("rude", "functions.py") as server:
        found = ask(server.url, ["abc", bad, "z"], retries=0)
    assert found.scores.tolist() == [3.0, 1.0 if bad == "\ud800" else 0.0, 1.0]
    assert found.failed["far"].tolist() == [False, bad != "\ud800", False]
    assert bad != "surrogate" or r"ValueError: \ud800 in the text" in found.examples[0].message


def test_a_sample_that_cannot_be_sent_fails_alone() -> None:
    deep: Any = 0
    for _ in range(400):
        deep = [deep]
    samples = [made("abc"), replace(made("de"), extra={"call": deep}), replace(made("f"), row={"big": 10**5000})]
    with served("length", "functions.py") as server:
        scorer = RemoteScorer(RewardDef(name="far", target=server.url), RemoteOptions(retries=0), RewardLimits())
        try:
            found = scorer.submit([*samples, made("z")]).result(30)
        finally:
            scorer.close()
    assert found.scores.tolist() == [3.0, 0.0, 0.0, 1.0]
    assert "the sample cannot be sent: " in found.examples[0].message


def test_other_clients_may_send_what_strict_parsers_refuse(server: RewardServer) -> None:
    deep: Any = 0
    for _ in range(300):
        deep = [deep]
    samples = [{**ONE, "response": "\ud800", "row": {"\udfff": "x"}}, {**ONE, "extra": {"deep": deep}}, ONE]
    status, found = post(server, json.dumps({"samples": samples}).encode())
    assert status == 200
    first, second, third = found["results"]
    assert (first["score"], third["score"]) == (0.5, 0.5)
    assert second["error"] == "this sample cannot be graded: JSON that nests more than 150 levels"


def test_an_unexpected_error_answers_500_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(RewardRunner):
        def submit(self, samples: Any) -> Any:
            raise LookupError("an error \x1b[31m that nobody expected")

    with Broken([RewardDef(name="it", target=f"{HERE}/functions.py:length")]) as runner:
        server = RewardServer(runner, ServeOptions(port=0))
        thread = threading.Thread(target=server.run)
        thread.start()
        status, found = post(server, json.dumps({"samples": [ONE]}).encode())
        server.stop()
        thread.join(60)
    assert (status, found) == (500, {"error": "unexpected LookupError; the log of the service has the details"})
    assert "LookupError: an error \\x1b[31m that nobody expected" in caplog.text


def test_more_requests_at_once_than_allowed_are_told_to_come_again() -> None:
    with served("slow", "functions.py", max_requests=1) as server:
        found: list[int] = []
        samples = [ONE] * 20

        def one() -> None:
            found.append(post(server, json.dumps({"samples": samples}).encode())[0])

        threads = [threading.Thread(target=one) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(found) == [200, 503, 503]
        assert ask(server.url, ["abc"]).scores.tolist() == [3.0]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_an_address_that_others_reach_needs_a_token(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(ConfigError, match=r"needs a token; .* --token-env REWARD_TOKEN"):
        RewardServer(RewardRunner([RewardDef(name="a", target="m:f")]), ServeOptions(host=host))


def test_an_address_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port}: cannot listen on 127.0.0.1: .*in use"):
            RewardServer(RewardRunner([RewardDef(name="a", target="m:f")]), ServeOptions(port=port))


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_the_command_serves_until_it_is_told_to_stop(tmp_path: Path, stop: signal.Signals) -> None:
    """A reward with options of a configuration file; the token comes from the environment and is printed nowhere."""
    config = tmp_path / "rewards.yaml"
    name = f"{HERE}/functions.py:answer_is_right"
    config.write_text(f"rewards: [{{name: '{name}', label: right, options: {{right: 7}}}}]")
    start = [sys.executable, "-c", "from rlsdk.cli import main; main()"]
    command = [*start, "reward", "serve", "right", "--port", "0", "--token-env", "MY_TOKEN"]
    process = subprocess.Popen(
        [*command, "--config", str(config)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "MY_TOKEN": "s3cret"},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        said = process.stdout.readline() + process.stdout.readline()
        found = re.search(r"reward 'right' answers at (http://127\.0\.0\.1:\d+/score); Ctrl-C ends it", said)
        assert found, said + process.stdout.read()
        assert f"rlsdk train --rewards '[{{name: \"{found[1]}\", remote: {{token_env: MY_TOKEN}}}}]'" in said
        sample = RewardSample(prompt="p", response="4", answer="4", row={}, truncated=False)
        options = RemoteOptions(headers={"Authorization": "Bearer s3cret"})
        scorer = RemoteScorer(RewardDef(name="far", target=found[1]), options, RewardLimits())
        assert scorer.submit([sample]).result(30).scores.tolist() == [7.0]
        scorer.close()
        port = int(found[1].removesuffix("/score").rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as silent:
            silent.sendall(b"POST /score HTTP/1.1\r\n")
            process.send_signal(stop)
            rest = process.communicate(timeout=15)[0]
        assert process.returncode == 0
        assert "s3cret" not in said + rest
    finally:
        process.kill()
        process.communicate()


def test_the_command_refuses_what_cannot_be_served(tmp_path: Path) -> None:
    from rlsdk.cli.models.reward import serve

    config = tmp_path / "rewards.yaml"
    config.write_text("rewards: [{name: gsm8k, label: numbers}]")
    with pytest.raises(ConfigError, match=r"'number' is not one of the .* rewards .*did you mean 'numbers'"):
        serve("number", ["--config", str(config)], ServeOptions(port=0), None)
    with pytest.raises(RlsdkError, match="did you mean 'gsm8k'"):
        serve("gsm8", [], ServeOptions(port=0), None)
    with pytest.raises(ConfigError, match="environment variable 'NOT_SET_HERE' is not set"):
        serve("gsm8k", [], ServeOptions(port=0), "NOT_SET_HERE")
    with pytest.raises(ConfigError, match="is a service already"):
        serve("http://127.0.0.1:1/score", [], ServeOptions(port=0), None)
