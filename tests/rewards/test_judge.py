"""A model as judge: what it is asked, what counts as its verdict, and a real model behind the OpenAI chat protocol."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rlsdk.interfaces import ConfigError, RewardSample
from rlsdk.rewards import RewardDef, RewardLimits, RewardResult
from rlsdk.rewards.services.http_client import RemoteOptions
from rlsdk.rewards.services.judge import JudgeClient, JudgeOptions, VerdictError, question, verdict
from rlsdk.rewards.services.remote import RemoteScorer

ASKED = JudgeOptions(model="m", template="Q: {question}\nA: {response}\nScore:", highest=10.0)


def made(response: str = "r", **row: Any) -> RewardSample:
    return RewardSample(prompt="<p>", response=response, answer=None, row=row, truncated=False)


def test_a_question_is_the_template_with_its_places_filled_in_once() -> None:
    options = JudgeOptions(model="m", template="{prompt}|{response}|{meta.level}|{question}|{}|{0}|{{}}")
    sample = made("{question} {prompt.__class__}", question="{answer}?", meta={"level": 3})
    assert question(sample, options) == "<p>|{question} {prompt.__class__}|3|{answer}?|{}|{0}|{{}}"
    with pytest.raises(
        VerdictError, match=r"asks for \{question\}, which this row does not have; did you mean 'qestion'"
    ):
        question(made(qestion="q"), ASKED)
    with pytest.raises(VerdictError, match=r"asks for \{answer\}"):
        question(made(), JudgeOptions(model="m", template="{response} {answer}"))


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("Score: 7", 0.7),
        ("Score: 3\nOn reflection, **Score:** 10.", 1.0),
        ("my rating = 0, sorry", 0.0),
        ("Verdict : 2.5", 0.25),
        ("Score: 1e1", 1.0),
        ("Score: 10", 1.0),
        ("Score: 8.5.", 0.85),
        ("Score: 3/10", 0.3),
        ("Score: 8 out of 10, for its style", 0.8),
        ("**Score: 8**/10", 0.8),
        ("Score: 7, 2 errors", 0.7),
        ("Score: 8 - 2 errors", 0.8),
    ],
)
def test_the_last_number_that_is_called_a_score_is_the_verdict(reply: str, score: float) -> None:
    assert verdict(reply, ASKED) == score


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ("7 out of 10", "has no verdict: it ends in '7 out of 10'"),
        ("Score: 11", "is 11; expected 0 to 10"),
        ("Score: -1", "is -1; expected 0 to 10"),
        ("Score: nan", "is nan; expected 0 to 10"),
        ("Score: high", "is 'high'; expected a number"),
        ("Score: 4,5", "is '4,5', of which the pattern matches only '4'; expected a number"),
        ("Score: 1,000", "is '1,000', of which"),
        ("Score: 3/5", "is '3/5', of which"),
        ("**Score: 3**/5", "is '3/5', of which"),
        ("Score: 8/100", "is '8/100', of which"),
        ("Score: 8 out of 20", "is '8 out of 20', of which"),
        ("Score: 5%", "is '5%', of which"),
        ("Score: 7\u20138", "of which the pattern matches only '7'"),
        ("Score: 4 1/2", "is '4 1/2', of which"),
        ("Score: 7-8", "is '7-8'; expected a number"),
        ("Score: 1_0", "is '1_0'; expected a number"),
        ("Score: 1e999", "is inf; expected 0 to 10"),
    ],
)
def test_any_other_reply_is_no_verdict(reply: str, message: str) -> None:
    with pytest.raises(VerdictError, match=message):
        verdict(reply, ASKED)


@pytest.mark.parametrize(
    ("pattern", "reply", "score"),
    [
        (r"(\d)", "8.5", None), (r"(\d+)", "8.5", None), (r"(\d+)", "8/10", None), (r"(\d+)/10", "8/10", 0.8),
        (r"Score: (\d)", "Score: 10", None), (r"Score: (\d)", "Score: 9", 0.9), (r"(\d)/10", "10/10", None),
        (r"(\d+)", "-3", None), (r"(\d+)", "rating-3", 0.3), (r"(\d+)", "1e1", None), (r"(\d+(?:\.\d+)?)", "8.5", 0.85),
        (r"(\d+)$", "4,5", None), (r"\[(\d+)\]", "[10]", 1.0), (r"(\d+)(?=%)", "8%", None),
        (r"(\d+) points", "8 points", 0.8),
    ],
)  # fmt: skip
def test_a_part_of_a_number_is_no_verdict_whatever_the_pattern(pattern: str, reply: str, score: float | None) -> None:
    options = JudgeOptions(model="m", template="", pattern=pattern, highest=10.0)
    if score is not None:
        assert verdict(reply, options) == pytest.approx(score)
        return
    with pytest.raises(VerdictError, match=r"of which the pattern matches only"):
        verdict(reply, options)


def test_a_percentage_is_a_verdict_up_to_100() -> None:
    options = JudgeOptions(model="m", template="", highest=100.0)
    assert verdict("Score: 80%", options) == pytest.approx(0.8)
    assert verdict("Score: 80/100", options) == pytest.approx(0.8)


def test_the_end_of_a_reply_that_was_cut_is_no_verdict() -> None:
    assert verdict("Score: 1", ASKED) == 0.1
    with pytest.raises(VerdictError, match=r"was cut after 'Score: 1' by judge.max_tokens 1024"):
        verdict("Score: 1", ASKED, is_cut=True)
    with pytest.raises(VerdictError, match=r"was cut after 'Score: 8.5'"):
        verdict("Score: 8.5", ASKED, is_cut=True)
    assert verdict("Score: 1\nBecause", ASKED, is_cut=True) == 0.1
    assert verdict("Score: 8", ASKED, is_cut=True) == 0.8  # 80 is not in the range
    options = JudgeOptions(model="m", template="", pattern="(.+)", choices={"yes": 1.0})
    assert verdict("yes", options, is_cut=True) == 1.0  # with max_tokens 1, every reply is cut


def test_a_part_of_a_word_is_no_choice() -> None:
    options = JudgeOptions(model="m", template="", pattern=r"(?i)(yes|no)", choices={"yes": 1.0, "no": 0.0})
    assert verdict("no, yes.", options) == 1.0
    for reply in ("not sure", "piano"):
        with pytest.raises(VerdictError, match="expected one of"):
            verdict(reply, options)


def test_verdicts_may_be_choices_and_have_a_form_of_their_own() -> None:
    options = JudgeOptions(model="m", template="{response}", pattern=r"\[\[(\w+)\]\]", choices={"A": 1.0, "tie": 0.5})
    assert verdict("[[B]] no, [[a]]", options) == 1.0
    assert verdict("[[TIE]]", options) == 0.5
    with pytest.raises(VerdictError, match=r"is 'C'; expected one of \['A', 'tie'\]"):
        verdict("[[C]]", options)


class Chat(BaseHTTPRequestHandler):
    """The OpenAI chat protocol in front of a function of the question."""

    answer: Any
    asked: list[dict[str, Any]]

    def do_GET(self) -> None:
        self.send({"object": "list", "data": [{"id": "judge-7b", "object": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append({"path": self.path, **body})
        text = self.answer(body)
        self.send({"id": "1", "choices": [{"index": 0, "message": {"role": "assistant", "content": text}}]})

    def send(self, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def chatting(answer: Any) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    handler = type("Bound", (Chat,), {"answer": staticmethod(answer), "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", handler.asked  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def judging(url: str, options: JudgeOptions, **remote: Any) -> Iterator[RemoteScorer]:
    asked = RemoteOptions(**{"batch_size": 1, "batch_wait_s": 0.0, **remote})
    make = functools.partial(JudgeClient, judge=options)
    scorer = RemoteScorer(RewardDef(name="judge", target=url), asked, RewardLimits(), make)
    try:
        yield scorer
    finally:
        scorer.close()


def test_each_response_is_asked_about_and_what_has_no_verdict_fails_alone() -> None:
    def answer(body: dict[str, Any]) -> str:
        text: str = body["messages"][-1]["content"]
        return "no idea" if "bad" in text else f"It is fine.\nScore: {text.count('x')}"

    options = JudgeOptions(**{**vars(ASKED), "model": "judge-7b", "system_prompt": "Be strict.", "temperature": 0.5})
    with chatting(answer) as (url, asked), judging(url, options, max_concurrent=3) as scorer:
        scorer.check()
        samples = [made("x" * at, question="why") for at in range(5)]
        result: RewardResult = scorer.submit([*samples, made("bad", question="why"), made("x")]).result(30)
    assert result.by_reward["judge"].tolist() == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.0, 0.0])
    assert result.failures == {"service": 2}
    assert [one.message for one in result.examples] == [
        f"{url}: the judge's reply has no verdict: it ends in 'no idea'",
        f"{url}: the judge's template asks for {{question}}, which this row does not have",
    ]
    first = next(one for one in asked if "A: xx\n" in one["messages"][-1]["content"])
    assert first == {
        "path": "/v1/chat/completions", "model": "judge-7b", "temperature": 0.5, "max_tokens": 1024, "seed": 0,
        "messages": [
            {"role": "system", "content": "Be strict."},
            {"role": "user", "content": "Q: why\nA: xx\nScore:"},
        ],
    }  # fmt: skip
    assert len(asked) == 6


def test_a_service_without_the_model_is_refused_before_the_run() -> None:
    options = JudgeOptions(model="judge-8b", template="{response}")
    refused = pytest.raises(ConfigError, match=r"has no model 'judge-8b'; did you mean 'judge-7b'\?; it has")
    with chatting(str) as (url, _), judging(url, options) as scorer, refused:
        scorer.check()


def test_an_answer_that_is_no_completion_is_a_failure_with_the_url() -> None:
    with chatting(lambda body: None) as (url, _), judging(url, ASKED) as scorer:
        result = scorer.submit([made(question="q")]).result(30)
    assert result.examples[0].message == f"{url}/chat/completions answered a completion without text"
