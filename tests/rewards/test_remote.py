"""Rewards over HTTP, against a real server on the loopback: batches, retries, limits, and every fault in words."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rlsdk.interfaces import ConfigError, DataError, RewardSample
from rlsdk.rewards import RewardDef, RewardLimits, RewardResult
from rlsdk.rewards.services.http_client import RemoteOptions, check_url
from rlsdk.rewards.services.remote import RemoteScorer

from .services import Service, serving


@pytest.fixture
def service() -> Iterator[Service]:
    with serving() as found:
        yield found


def made(response: str, row: dict[str, Any] | None = None) -> RewardSample:
    return RewardSample(prompt="p", response=response, answer=None, row=row or {}, truncated=False, response_ids=(3, 5))


def score(service: Service, path: str, responses: list[str], **options: Any) -> RewardResult:
    options = {"retry_wait_s": 0.01, "timeout_s": 20.0, **options}
    reward = RewardDef(name="far", target=f"{service.base}{path}", weight=2.0)
    scorer = RemoteScorer(reward, RemoteOptions(**options), RewardLimits())
    try:
        return scorer.submit([made(response) for response in responses]).result(30)
    finally:
        scorer.close()


def test_scores_come_back_in_order_and_what_is_wrong_costs_its_sample(service: Service) -> None:
    result = score(service, "/score", ["abc", "", "error", "nan", "z"])
    assert result.by_reward["far"].tolist() == [3.0, 0.0, 0.0, 0.0, 1.0]
    assert result.graded["far"].tolist() == [True, False, False, False, True]
    assert result.failures == {"service": 1, "nan": 1}
    assert result.scores.tolist() == [6.0, 0.0, 0.0, 0.0, 2.0]
    assert result.metrics == {0: {"far/chars": 3.0}, 4: {"far/chars": 1.0}}
    assert [one.message for one in result.examples] == [
        f"{service.base}/score: this one cannot be graded",
        "the function gave nan",
    ]
    (request,) = service.requests
    assert request["version"] == 1
    assert request["samples"][0] == {
        "prompt": "p", "response": "abc", "answer": None, "row": {}, "truncated": False, "extra": {},
        "response_ids": None,
    }  # fmt: skip


def test_token_ids_are_sent_where_that_is_asked_for(service: Service) -> None:
    result = score(service, "/score", ["abc"], send_tokens=True)
    assert result.token_scores[0].tolist() == [6.0, 10.0]


def test_samples_of_many_calls_go_together_in_batches_of_bounded_size(service: Service) -> None:
    reward = RewardDef(name="far", target=f"{service.base}/score")
    scorer = RemoteScorer(reward, RemoteOptions(batch_size=5, batch_wait_s=0.2, max_concurrent=2), RewardLimits())
    try:
        futures = [scorer.submit([made("x" * (at + 1))]) for at in range(12)]
        found = [future.result(30).scores.tolist() for future in futures]
    finally:
        scorer.close()
    assert found == [[at + 1.0] for at in range(12)]
    assert sorted(len(request["samples"]) for request in service.requests) == [2, 5, 5]


def test_rows_that_the_reward_is_not_for_are_not_sent(service: Service) -> None:
    reward = RewardDef(name="far", target=f"{service.base}/score", rows={"source": ["a"]})
    scorer = RemoteScorer(reward, RemoteOptions(), RewardLimits())
    try:
        result = scorer.submit([made("abc", {"source": "b"}), made("de", {"source": "a"})]).result(30)
        nothing = scorer.submit([made("abc", {"source": "b"})]).result(30)
    finally:
        scorer.close()
    assert result.graded["far"].tolist() == [False, True]
    assert nothing.graded["far"].tolist() == [False]
    assert [len(request["samples"]) for request in service.requests] == [1]


@pytest.mark.parametrize("fault", ["400", "413", "422", "500", "503", "drop"])
def test_a_sample_that_the_service_cannot_take_fails_alone(service: Service, fault: str) -> None:
    texts = [f"bad {fault}" if at in (2, 3, 8) else "x" * (at + 1) for at in range(11)]
    result = score(service, "/no-bad", texts, retries=1)
    assert result.by_reward["far"].tolist() == [0.0 if at in (2, 3, 8) else at + 1.0 for at in range(11)]
    assert result.graded["far"].tolist() == [at not in (2, 3, 8) for at in range(11)]
    assert result.failures == {"service": 3}
    assert re.search("cannot be reached" if fault == "drop" else f"answered {fault}", result.examples[0].message)


def test_splitting_ends_when_the_service_takes_long_to_fail(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlsdk.rewards.services.remote._SPLIT_TIMEOUTS", 0)
    result = score(service, "/no-bad", ["a", "bad 500", "c", "d"], retries=0)
    assert result.failures == {"service": 4}
    assert service.attempts == 1


def test_a_busy_service_says_how_long_to_wait(service: Service) -> None:
    began = time.monotonic()
    assert score(service, "/busy-once", ["abc"]).scores.tolist() == [6.0]
    assert time.monotonic() - began >= 1
    assert service.attempts == 2


@pytest.mark.parametrize(("path", "attempts"), [("/fails-twice", 3), ("/drops-once", 2)])
def test_what_may_pass_is_tried_again(service: Service, path: str, attempts: int) -> None:
    assert score(service, path, ["abc"]).scores.tolist() == [6.0]
    assert service.attempts == attempts


@pytest.mark.parametrize(
    ("path", "attempts", "message"),
    [
        ("/500", 5, r"answered 500: '{\"error\": \"a secret place.{,300}'\.\.\. \(3 attempts\)$"),
        ("/drops", 5, r"cannot be reached: .+ \(3 attempts\)$"),
        ("/404", 1, r"answered 404: '{\"error\": \"no such thing\"}'$"),
        (
            "/redirect",
            1,
            r"redirects to 'http://example.invalid/score', which is not followed; name the URL that it redirects to$",
        ),
        ("/gzip", 1, r"answered compressed data, which was not requested"),
        ("/html", 1, r"answered no scores: the body: Invalid JSON.*: '<html>hello</html>'$"),
        ("/deep", 1, r"answered no scores: the body: Invalid JSON: recursion limit"),
        ("/list", 1, r"answered no scores: the body: Input should be an object: '\[1.0\]'$"),
        ("/text", 1, r"answered no scores: results.0.score: Input should be a valid number; results.1.score"),
        ("/unknown", 1, r"answered no scores: results.0.scores: Extra inputs are not permitted"),
        ("/fewer", 1, r"answered 0 results; expected 2$"),
        ("/401", 1, r"answered 401: '{}'$"),
        ("/429", 3, r"answered 429: '{}' \(3 attempts\)$"),
        ("/floods", 3, r"answered more than max_response_bytes 8388608$"),
    ],
)
def test_a_fault_of_the_service_fails_its_samples_with_the_url_and_the_reason(
    service: Service, path: str, attempts: int, message: str
) -> None:
    result = score(service, path, ["a", "b"], retries=2)
    assert result.failures == {"service": 2}
    assert not result.valid.any()
    text = result.examples[0].message
    assert text.startswith(f"{service.base}{path} ")
    assert re.search(message, text), text
    assert service.attempts == attempts


def test_a_service_that_answers_too_slowly_is_given_up_whatever_it_drips(service: Service) -> None:
    began = time.monotonic()
    result = score(service, "/drips", ["a"], timeout_s=0.5)
    assert time.monotonic() - began < 30, "a minute's worth of drops"
    assert result.failures == {"timeout": 1}
    assert result.examples[0].message == f"{service.base}/drips did not answer within 0.5 s"
    assert service.attempts == 1


def test_nobody_there_is_a_connection_error_that_is_tried_again() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    gone = Service(f"http://127.0.0.1:{port}")
    result = score(gone, "/score", ["a"], retries=1)
    assert re.search(r"cannot be reached: .* \(2 attempts\)", result.examples[0].message)


def test_secrets_are_sent_and_shown_nowhere(service: Service) -> None:
    options = {"headers": {"Authorization": "Bearer s3cret", "X-Key": "s3cret"}}
    assert score(service, "/score", ["a"], **options).valid.all()
    assert service.headers[0]["Authorization"] == "Bearer s3cret"
    assert service.headers[0]["X-Key"] == "s3cret"
    assert "s3cret" not in repr(RemoteOptions(**options))  # type: ignore[arg-type]
    for path in ("/500", "/404", "/html", "/redirect"):
        assert "s3cret" not in score(service, path, ["a"], retries=0, **options).examples[0].message


def test_cancelling_and_closing_leave_nobody_waiting(service: Service) -> None:
    scorer = RemoteScorer(
        RewardDef(name="far", target=f"{service.base}/drips"), RemoteOptions(max_concurrent=1), RewardLimits()
    )
    futures = [scorer.submit([made("a")]) for _ in range(3)]
    futures[2].cancel()
    time.sleep(0.1)
    scorer.close()
    scorer.close()
    assert all(future.cancelled() for future in futures)
    assert not any(thread.name == "rlsdk-remote-reward" for thread in threading.enumerate())


def test_a_service_is_looked_at_before_the_run(service: Service) -> None:
    good = RemoteScorer(RewardDef(name="far", target=f"{service.base}/score"), RemoteOptions(), RewardLimits())
    bad = RemoteScorer(RewardDef(name="far", target=f"{service.base}/html"), RemoteOptions(), RewardLimits())
    try:
        good.check()
        with pytest.raises(ConfigError, match=r"reward 'far': http.*/html answered no scores.*`rlsdk reward serve`"):
            bad.check()
    finally:
        good.close()
        bad.close()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://user:pw@host/score", "a URL with a password .* remote.token_env"),
        ("http:///score", "expected a URL such as http://127.0.0.1:8700/score"),
        ("http://host:99999/score", "expected a URL such as"),
    ],
)
def test_urls_that_cannot_be_asked_are_refused_without_their_secrets(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check_url(url)
    assert "pw" not in str(caught.value).replace("password", "")


def test_a_row_that_is_not_json_ends_the_run_in_words(service: Service) -> None:
    scorer = RemoteScorer(RewardDef(name="far", target=f"{service.base}/score"), RemoteOptions(), RewardLimits())
    try:
        with pytest.raises(DataError, match="cannot be sent to a reward service"):
            scorer.submit([made("a", {"image": b"x"})])
    finally:
        scorer.close()


def test_a_service_that_is_refused_at_the_start_leaves_no_thread_and_no_open_file() -> None:
    before, open_before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    reward = RewardDef(name="far", target="ftp://somewhere/score")
    for _ in range(3):
        with pytest.raises(ConfigError):
            RemoteScorer(reward, RemoteOptions(), RewardLimits())
    # Those of other tests may end meanwhile.
    assert threading.active_count() <= before
    assert len(os.listdir("/proc/self/fd")) <= open_before
