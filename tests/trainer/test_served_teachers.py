"""Teachers in rollout engines and in services, and the divergence over a teacher's most probable tokens."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from test_loop import TASK, Recorder, config_of, model, registry, run, trainer_of
from test_teachers import alone, plain_log_probs, teachers, trained
from transformers import AutoModelForCausalLM

from rlsdk.config import check_run, needed_roles
from rlsdk.interfaces import BackendKind, Batch, BatchError, Capability, ConfigError, RlsdkError, hookimpl
from rlsdk.planning.calibration import planned_passes
from rlsdk.registry import Registry
from rlsdk.rewards.services.http_client import RemoteOptions
from rlsdk.trainer.inputs.prompt_scorers import ServiceScorer, run_apart
from rlsdk.trainer.inputs.teachers import row_field
from rlsdk.trainer.learner.teaching import with_teacher

__all__ = ["model", "registry", "teachers"]

TOP_K = ("--algorithm.distillation.objective", "top_k", "--algorithm.distillation.top_k")
ONE_UPDATE = ("--trainer.updates_per_step", "1")


def learned(view: Recorder) -> list[dict[str, float]]:
    """What the policy learned in each step."""
    return [{k: v for k, v in step.items() if k.startswith(("policy/", "teacher/"))} for step in view.steps]


def of_plain(path: str, row: list[int], count: int) -> tuple[list[float], list[list[tuple[int, float]]]]:
    """Log-probs of a row's tokens from the second one on, and the most probable tokens in their places."""
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        logs = plain(torch.tensor([row])).logits[0, :-1].log_softmax(-1)
    values, ids = logs.topk(count, dim=-1)
    best = [list(zip(*pair, strict=True)) for pair in zip(ids.tolist(), values.tolist(), strict=True)]
    return logs.gather(-1, torch.tensor(row[1:])[:, None])[:, 0].tolist(), best


def as_vllm(path: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    """A choice of vLLM: by token, as `Logprob` is written; the given token first, and those that were asked for."""
    chosen, best = of_plain(path, asked["prompt"], max(asked["prompt_logprobs"], 1))
    places: list[Any] = [None]
    for token, value, others in zip(asked["prompt"][1:], chosen, best, strict=True):
        known = {token: value} | dict(others[: asked["prompt_logprobs"]])
        places.append({str(key): {"logprob": one, "rank": 1, "decoded_token": "?"} for key, one in known.items()})
    return {"text": "?", "prompt_logprobs": places}


def as_sglang(path: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    """A choice of SGLang: in order, the new token last."""
    assert asked["echo"]
    assert asked["logprobs"]
    chosen, _ = of_plain(path, asked["prompt"], 1)
    return {"text": "?", "logprobs": {"token_logprobs": [None, *chosen, -1.0], "tokens": ["?"] * (len(chosen) + 2)}}


@contextmanager
def service(path: str, answer: Any) -> Iterator[str]:
    """The URL of a service with the model of a folder under the name `big`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send({"data": [{"id": "big"}]})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert (asked["model"], asked["max_tokens"], self.path) == ("big", 1, "/v1/completions")
            self._send({"choices": [answer(path, asked)]})

        def _send(self, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("objective", ["sampled", "top_k"])
def test_a_rollout_engine_and_services_teach_as_a_train_engine_does(
    objective: str, model: str, teachers: list[str], registry: Registry, tmp_path: Path
) -> None:
    """The engine with its weights in turns with the actor's; a service as vLLM answers, and as SGLang does."""
    flags = (*TOP_K, "9", *ONE_UPDATE) if objective == "top_k" else ONE_UPDATE
    view, batches = trained(alone(model, registry, 3, teachers[0], *flags), registry, tmp_path / "train")
    config = alone(model, registry, 3, [{"path": teachers[0], "rollout": {"max_running_samples": 5}}], *flags)
    assert needed_roles(config) == ("actor", "rollout", "teacher")
    assert check_run(config, registry) == []
    turns = run(config, registry, tmp_path / "turns", forced=True)
    same = {"rel": 1e-4, "abs": 1e-4}
    for mine, expected in zip(learned(turns), learned(view), strict=True):
        assert mine == pytest.approx(expected, **same)
    if objective == "sampled":
        mask = batches[0]["response_mask"]
        plain = plain_log_probs(teachers[0], batches[0])
        torch.testing.assert_close(batches[0]["teacher_log_probs"][mask], plain[mask], rtol=1e-5, atol=1e-5)
    for answer in (as_vllm, as_sglang) if objective == "sampled" else (as_vllm,):
        with service(teachers[0], answer) as url:
            given = [{"url": url, "model": "big", "tokenizer": teachers[0]}]
            config = alone(model, registry, 3, given, *flags)
            assert needed_roles(config) == ("actor", "rollout")
            served = run(config, registry, tmp_path / answer.__name__)
        for mine, expected in zip(learned(served), learned(view), strict=True):
            assert mine == pytest.approx(expected, **same)


@pytest.mark.parametrize(("divergence", "beta"), [("reverse", 1.0), ("forward", 0.0), ("jsd", 0.5)])
def test_the_top_tokens_give_a_lower_bound_that_is_learned(
    divergence: str, beta: float, model: str, teachers: list[str], registry: Registry, tmp_path: Path
) -> None:
    """With all tokens the divergence is the exact one; with few it is lower, and falls."""
    more = (*ONE_UPDATE, "--algorithm.distillation.divergence", divergence, "--train.optim.lr", "3e-3")
    exact = run(
        alone(model, registry, 1, teachers[0], "--algorithm.distillation.objective", "exact", *more),
        registry,
        tmp_path / "exact",
    )
    whole = run(alone(model, registry, 1, teachers[0], *TOP_K, "128", *more), registry, tmp_path / "whole")
    loss = "policy/divergence_loss"
    assert whole.steps[0][loss] == pytest.approx(exact.steps[0][loss], rel=1e-4)
    assert whole.steps[0]["policy/grad_norm"] == pytest.approx(exact.steps[0]["policy/grad_norm"], rel=1e-3)
    config = alone(model, registry, 6, teachers[0], *TOP_K, "6", *more)
    assert [(one.role, one.output, one.field) for one in planned_passes(config, registry).passes] == [
        ("teacher", "top_log_probs", "teacher_top_log_probs")
    ]
    few = run(config, registry, tmp_path / "few")
    assert 0.0 < few.steps[0][loss] < exact.steps[0][loss]
    assert few.steps[-1][loss] < 0.8 * few.steps[0][loss]
    assert few.steps[0]["teacher/share"] == 1.0
    assert few.steps[0]["teacher/gap"] == pytest.approx(whole.steps[0]["teacher/gap"], abs=1e-5)


def test_two_teachers_of_different_rows_teach_by_their_top_tokens(
    model: str, teachers: list[str], registry: Registry, tmp_path: Path
) -> None:
    """One in a train engine at a temperature of its own and with a prompt of its own, the other in a rollout engine;
    where both would teach a row, the run is refused."""
    rows = [{"question": f"{at} + {at} =", "answer": str(2 * at), "task": "ab"[at % 2]} for at in range(24)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given: list[dict[str, Any]] = [
        {"path": teachers[0], "name": "a", "rows": {"task": ["a"]}, "temperature": 1.5},
        {"path": teachers[1], "name": "b", "rows": {"task": ["b"]}, "rollout": {}},
    ]
    given[0]["prompt_template"] = "{answer}: {prompt}"
    flags = ("--data", str(tmp_path / "rows.jsonl"), *TOP_K, "5", *ONE_UPDATE, "--trainer.seed", "3")
    view, (batch,) = trained(alone(model, registry, 1, given, *flags), registry, tmp_path / "run")
    mask = batch["response_mask"]
    of_b = mask & batch[row_field("teacher.b")][batch.row_of_token]
    assert 0 < int(of_b.sum()) < int(mask.sum())
    assert (batch["teacher_weight"][mask] == 1.0).all()
    assert not batch["teacher_weight"][~mask].any()
    assert view.steps[0]["teacher/a/tokens"] + view.steps[0]["teacher/b/tokens"] == int(mask.sum())
    plain = AutoModelForCausalLM.from_pretrained(teachers[1], dtype=torch.float32).eval()
    for start, end in zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True):
        if of_b[start:end].any():
            with torch.no_grad():
                logs = plain(batch["input_ids"][start:end][None]).logits[0, :-1].log_softmax(-1).topk(5).values
            found = batch["teacher_top_log_probs"][start + 1 : end][of_b[start + 1 : end]]
            torch.testing.assert_close(found, logs[of_b[start + 1 : end]], rtol=1e-4, atol=1e-4)
    both = [given[0], {**given[1], "rows": {}}]
    with (
        pytest.raises(ConfigError, match=r"teacher.a and teacher.b teach .* a row may have one"),
        trainer_of(alone(model, registry, 1, both, *flags), registry, tmp_path / "both", Recorder()),
    ):
        pass


def test_what_a_served_teacher_cannot_do_is_refused(model: str, registry: Registry) -> None:
    def refused(given: dict[str, Any], match: str, *flags: str) -> None:
        with pytest.raises(ConfigError, match=match):
            alone(model, registry, 1, [given], *flags)

    engine, url = {"path": "a", "rollout": {}}, {"url": "http://a/v1", "model": "b", "tokenizer": "a"}
    for one in (engine, url):
        refused(one | {"temperature": 0.7}, "expected 1.0 .this is its own")
        refused(one, r"teachers\.0\.temperature.* 0\.6.*that of rollout\.temperature", "--rollout.temperature", "0.6")
        refused(one, "expected 'top_k' or 'sampled'", "--algorithm.distillation.objective", "exact")
    refused(url | {"path": "a"}, "expected one of the two, a model of the run or a service")
    refused({"url": "http://a/v1"}, r"model: is required beside url(.|\n)*tokenizer: is required beside url")
    refused({"path": "a", "model": "b"}, "belongs to a teacher that is a service")
    refused(url | {"url": "a"}, "expected a URL such as")
    refused({"rollout": {}, "prompt_template": "{prompt}"}, "belongs to a teacher with a path")


def test_an_engine_that_gives_no_log_probs_of_prompts_is_refused_by_name(model: str, teachers: list[str]) -> None:
    registry = Registry.discover()
    spec = registry.backend(BackendKind.ROLLOUT, "transformers")

    class Mute:
        @hookimpl
        def rlsdk_register_backends(self, register: Any) -> None:
            register(replace(spec, name="mute", capabilities=spec.capabilities - {Capability.PROMPT_LOG_PROBS}))

    registry.register_module(Mute())
    given = {"path": teachers[0], "rollout": {"backend": "mute"}}
    (problem,) = check_run(alone(model, registry, 1, [given]), registry)
    assert problem.path == "teachers.0.rollout.backend"
    assert "prompt_log_probs" in str(problem)


@pytest.mark.parametrize(
    ("change", "count", "match"),
    [
        (lambda choice: choice | {"prompt_logprobs": None}, 0, "no log-probs of prompts"),
        (lambda choice: choice | {"prompt_logprobs": choice["prompt_logprobs"][:-1]}, 0, "no log-probs of prompts"),
        (lambda choice: {"prompt_logprobs": [None, *[{"1": {"logprob": -1.0}}] * 3]}, 0, "for other tokens"),
        (lambda choice: _each(choice, lambda value: value + 9.0), 0, "no log-probs: above 0"),
        (lambda choice: _each(choice, lambda value: float("-inf")), 0, "not finite"),
        (lambda choice: choice, 3, "fewer than 3 tokens of a place"),
        (lambda choice: {"text": "?", "logprobs": {"token_logprobs": [None, -1.0, -2.0, -1.0]}}, 3, "gives no ids"),
    ],
)  # fmt: skip
def test_a_service_that_answers_something_else_is_refused(
    change: Any, count: int, match: str, teachers: list[str]
) -> None:
    def answer(path: str, asked: Mapping[str, Any]) -> Any:
        return change(as_vllm(path, {**asked, "prompt_logprobs": 0}))

    with service(teachers[0], answer) as url:
        scorer = ServiceScorer(url, "big", RemoteOptions())
        with pytest.raises(RlsdkError, match=match):
            run_apart(scorer.score([[5, 6, 7, 8]], count))


def _each(choice: Mapping[str, Any], change: Any) -> Mapping[str, Any]:
    places = [None if one is None else {k: {"logprob": change(v["logprob"])} for k, v in one.items()}
              for one in choice["prompt_logprobs"]]  # fmt: skip
    return {"prompt_logprobs": places}


def test_a_service_is_asked_before_a_device_is_taken(
    model: str, teachers: list[str], registry: Registry, tmp_path: Path
) -> None:
    def refused(given: dict[str, Any], match: str) -> None:
        config = alone(model, registry, 1, [{"tokenizer": teachers[0], **given}])
        with pytest.raises(ConfigError, match=match), trainer_of(config, registry, tmp_path / "run", Recorder()):
            pass

    with service(teachers[0], as_vllm) as url:
        refused({"url": url, "model": "bigger"}, r"teachers.0.url .* has no model 'bigger'; did you mean 'big'")
    refused({"url": url, "model": "big", "remote": {"retries": 0}}, r"teachers.0.url .* cannot be reached")
    with service(teachers[0], lambda path, asked: {"text": "?"}) as url:
        refused({"url": url, "model": "big"}, r"teachers.0.url .* gives no log-probs of prompts")


def test_top_tokens_that_are_no_distribution_end_the_step(model: str, registry: Registry) -> None:
    """As of a field that was dropped on the way, and filled up."""

    class Dropped:
        def outputs(self, role: str, batch: Batch, names: Any) -> dict[str, torch.Tensor]:
            top = torch.full((batch.num_tokens, 3), -0.5)
            return {"top_ids": torch.zeros(batch.num_tokens, 3).long(), "top_log_probs": top, "log_probs": top[:, 0]}

    config = config_of(model, registry, 1, "--teachers", "a", *TOP_K, "3", "--data", TASK[1])
    batch = Batch.from_rows([[1, 2, 3]], **{row_field("teacher"): torch.tensor([True])})
    batch = batch.with_tokens(response_mask=torch.tensor([False, True, True])).with_meta(temperature=1.0)
    (each,) = [one for one in planned_passes(config, registry).passes if one.role == "teacher"]
    with pytest.raises(BatchError, match=r"teacher: the probabilities of its top tokens add up to 1\.81"):
        with_teacher(batch, Dropped(), each, config.teachers[0], config.algorithm.distillation)  # type: ignore[arg-type]
