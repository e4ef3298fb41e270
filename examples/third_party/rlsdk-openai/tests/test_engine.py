"""The engine against a real server: what comes back is what the model would say; what cannot be trusted is refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rlsdk_openai.config import OpenAiOptions
from rlsdk_openai.engine import OpenAiRolloutEngine
from small_server import Server

from rlsdk.interfaces import (
    BackendKind,
    ConfigError,
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    ModelSpec,
    RankContext,
    RolloutSpec,
    SamplingParams,
    UnsupportedCapabilityError,
    WorkerError,
)
from rlsdk.registry import Registry, Requirements, require
from rlsdk.testing.process.models import write_tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", seed=1))


@pytest.fixture(scope="session")
def server(model: str) -> Iterator[Server]:
    with Server(model) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def start(model: str, url: str, **changes: object) -> OpenAiRolloutEngine:
    options = OpenAiOptions(url=url, timeout_s=60.0)
    fields = {"model": ModelSpec(path=model), "max_model_tokens": 64, "options": options, **changes}
    engine = OpenAiRolloutEngine()
    engine.initialize(RankContext(role="rollout"), RolloutSpec(**fields))  # type: ignore[arg-type]
    return engine


@pytest.fixture
def engine(model: str, server: Server) -> Iterator[OpenAiRolloutEngine]:
    engine = start(model, server.url)
    yield engine
    engine.close()


def run(engine: OpenAiRolloutEngine, *requests: GenerationRequest) -> list[GenerationOutput]:
    async def collect() -> list[GenerationOutput]:
        return [output async for output in engine.generate(requests)]

    return sorted(asyncio.run(collect()), key=lambda output: (output.request_id, output.sample_index))


def ask(name: str, prompt: tuple[int, ...], n: int = 1, **sampling: object) -> GenerationRequest:
    params = SamplingParams(max_tokens=6, **sampling)  # type: ignore[arg-type]
    return GenerationRequest(request_id=name, prompt_ids=prompt, sampling=params, n=n)


def test_log_probs_are_those_of_the_model(engine: OpenAiRolloutEngine, server: Server) -> None:
    outputs = run(engine, ask("a", (5, 6, 7), n=3), ask("b", (9,)))
    assert [(output.request_id, output.sample_index) for output in outputs] == [("a", 0), ("a", 1), ("a", 2), ("b", 0)]
    for output in outputs:
        prompt = [5, 6, 7] if output.request_id == "a" else [9]
        with torch.inference_mode():
            logits = server.model(torch.tensor([[*prompt, *output.token_ids.tolist()]])).logits[0]
        expected = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(output.log_probs), expected, atol=1e-5)


def test_responses_end_with_their_stop_token_or_at_their_limit(engine: OpenAiRolloutEngine) -> None:
    (free,) = run(engine, ask("a", (5, 6), temperature=0.0))
    assert (len(free.token_ids), free.finish_reason) == (6, FinishReason.LENGTH)
    first = int(free.token_ids[0])
    (stopped,) = run(engine, ask("a", (5, 6), temperature=0.0, stop_token_ids=(first,)))
    assert (stopped.token_ids.tolist(), stopped.finish_reason) == ([first], FinishReason.STOP)
    (longest,) = run(engine, ask("a", tuple([5] * 62), temperature=0.0))
    assert len(longest.token_ids) == 2


def test_what_the_protocol_does_not_promise_is_refused(engine: OpenAiRolloutEngine) -> None:
    with pytest.raises(ConfigError, match=r"stop_strings .* does not support"):
        run(engine, ask("a", (5,), stop_strings=("x",)))
    for call in (engine.layout, lambda: engine.update_weights([], 1)):
        with pytest.raises(UnsupportedCapabilityError, match="cannot take weights"):
            call()


def test_a_server_that_gives_text_only_is_refused(model: str) -> None:
    with Server(model, plain=True) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        engine = start(model, server.url)
        with pytest.raises(WorkerError, match=r"no 'token_ids': .* text cannot be turned back into the ids"):
            run(engine, ask("a", (5,)))
        engine.close()
        server.shutdown()


def test_nobody_at_the_address_is_said_at_the_start(model: str) -> None:
    with pytest.raises(
        ConfigError, match=r"rollout\.openai\.url 'http://127\.0\.0\.1:9/v1': no OpenAI-compatible server"
    ):
        start(model, "http://127.0.0.1:9/v1")


def test_a_run_that_trains_is_refused_before_it_starts(model: str, server: Server) -> None:
    needed = Requirements(kind=BackendKind.ROLLOUT, takes_weights=True)
    with pytest.raises(UnsupportedCapabilityError, match="serves weights of its own and takes none from a trainer"):
        require(needed, "openai", Registry.discover())
    with pytest.raises(ConfigError, match="Use it with `rlsdk eval`"):
        start(model, server.url, load_weights=False)


def test_the_plugin_imports_no_engine_to_be_listed() -> None:
    spec = Registry.discover().backend(BackendKind.ROLLOUT, "openai")
    assert (spec.takes_weights, spec.capabilities) == (False, frozenset())


def test_prompts_go_as_ids_and_keys_stay_out_of_the_configuration(engine: OpenAiRolloutEngine, server: Server) -> None:
    run(engine, ask("a", (5, 6), seed=7))
    assert (server.asked[-1]["prompt"], server.asked[-1]["seed"]) == ([5, 6], 7)
    assert not any("key" in name and not name.endswith("variable") for name in vars(OpenAiOptions()))


def test_files_lie_where_the_wheel_takes_them() -> None:
    assert (Path(__file__).parents[1] / "src" / "rlsdk_openai" / "py.typed").exists()
