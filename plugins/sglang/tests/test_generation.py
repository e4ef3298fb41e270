"""Samples are what their requests asked for, with log-probs of the contract."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import (
    EXACT,
    STOP,
    ask,
    changed,
    collect,
    make_engine,
    plain_model,
    run,
    state_of,
    tokens_of,
    whole_shards,
    worst,
)

from rlsdk.interfaces import ConfigError, FinishReason
from rlsdk.testing.models import write_tiny_model

FILTERS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.5, "top_p": 0.7, "top_k": 30},
    {"min_p": 0.05, "temperature": 2.0},
]


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
def test_log_probs_are_those_after_temperature_and_before_filters(
    served: Any, plain: Any, sampling: dict[str, Any]
) -> None:
    requests = [ask(str(at), range(5, 9 + at), 4, max_tokens=30, seed=at, **sampling) for at in range(5)]
    outputs = run(served, requests)
    assert sorted(tokens_of(outputs)) == [(str(at), index) for at in range(5) for index in range(4)]
    assert worst(plain, requests, outputs) < EXACT


def test_requests_of_every_kind_share_a_batch(served: Any, plain: Any) -> None:
    kinds = [*FILTERS, {"temperature": 0.0}, {"top_k": 1}]
    requests = [ask(str(at), [5, 6, at + 7], 2, max_tokens=20, **kind) for at, kind in enumerate(kinds)]
    outputs = run(served, requests)
    assert worst(plain, requests, outputs) < EXACT
    for output in outputs:
        if output.request_id in ("4", "5"):
            prompt = requests[int(output.request_id)].prompt_ids
            row = [*prompt, *output.token_ids.tolist()]
            greedy = plain(plain.model.embed_tokens.weight.new_tensor([row]).long()).logits[0].argmax(-1)
            assert greedy[len(prompt) - 1 : -1].tolist() == output.token_ids.tolist()


def test_filters_bind(served: Any, plain: Any) -> None:
    request = ask("x", [5, 6], 12, max_tokens=12, temperature=2.0, top_k=2, stop_token_ids=())
    for output in run(served, [request]):
        row = plain.model.embed_tokens.weight.new_tensor([[5, 6, *output.token_ids.tolist()]]).long()
        best = plain(row).logits[0, 1:-1].topk(2).indices
        assert (best == row[0, 2:, None]).any(1).all()


def test_a_response_ends_with_its_first_stop_token_or_at_its_limit(served: Any) -> None:
    stops = tuple(range(2, 20))
    outputs = run(served, [ask("x", [25, 26], 16, max_tokens=12, stop_token_ids=stops, temperature=1.5)])
    assert {o.finish_reason for o in outputs} == {FinishReason.STOP, FinishReason.LENGTH}
    for output in outputs:
        tokens = output.token_ids.tolist()
        assert not set(tokens[:-1]) & set(stops)
        assert (tokens[-1] in stops) == (output.finish_reason is FinishReason.STOP)
        assert output.finish_reason is FinishReason.STOP or len(tokens) == 12


def test_nothing_but_the_request_ends_a_response(served: Any) -> None:
    """`STOP` is the model's end-of-sequence token."""
    outputs = run(served, [ask("x", [5], 16, max_tokens=100, stop_token_ids=(), temperature=2.0)])
    assert any(STOP in o.token_ids for o in outputs)
    assert {(o.finish_reason, len(o.token_ids)) for o in outputs} == {(FinishReason.LENGTH, 100)}


def test_the_engines_own_limit_ends_a_response_too(served: Any) -> None:
    output = run(served, [ask("x", [5] * 127, max_tokens=50, stop_token_ids=())])[0]
    assert (len(output.token_ids), output.finish_reason) == (1, FinishReason.LENGTH)


def test_stop_strings_end_a_response_with_the_token_that_completes_them(served: Any) -> None:
    request = ask("x", [5, 6], 12, max_tokens=40, stop_token_ids=(), stop_strings=("a", "7"), temperature=2.0)
    outputs = run(served, [request])
    text = served.stop_text.tokenizer.decode
    assert any(o.finish_reason is FinishReason.STOP for o in outputs)
    for output in outputs:
        stopped = output.finish_reason is FinishReason.STOP
        whole = text(output.token_ids.tolist())
        assert any(string in whole for string in ("a", "7")) == stopped
        assert not any(string in text(output.token_ids.tolist()[:-1]) for string in ("a", "7"))


def test_a_seed_gives_the_same_tokens_whatever_runs_beside_it(served: Any) -> None:
    request = ask("x", [5, 6, 7], 3, max_tokens=20, seed=11, temperature=1.3)
    alone = tokens_of(run(served, [request]))
    beside = [ask(str(at), [9, at + 4], 3, max_tokens=9 + at, seed=at) for at in range(6)]
    among = tokens_of(run(served, [*beside[:3], request, *beside[3:]]))
    assert {key: among[key] for key in alone} == alone
    assert len({tuple(tokens) for tokens in alone.values()}) == 3
    assert tokens_of(run(served, [ask("x", [5, 6, 7], 1, max_tokens=20, seed=11, temperature=1.3)])) == {
        ("x", 0): alone["x", 0]
    }
    assert tokens_of(run(served, [ask("x", [5, 6, 7], 3, max_tokens=20, seed=12, temperature=1.3)])) != alone


def test_without_a_seed_every_call_is_new(served: Any) -> None:
    request = ask("x", [5, 6, 7], 2, max_tokens=30, seed=None)
    assert tokens_of(run(served, [request])) != tokens_of(run(served, [request]))


def test_samples_follow_the_models_distribution(served: Any, plain: Any) -> None:
    """4,000 first tokens against their probabilities: chi-squared over the likeliest."""
    outputs = run(served, [ask(str(at), [5, 6], 400, max_tokens=1, seed=at, stop_token_ids=()) for at in range(10)])
    counts = np.bincount([int(o.token_ids[0]) for o in outputs], minlength=128)
    logits = plain(plain.model.embed_tokens.weight.new_tensor([[5, 6]]).long()).logits[0, -1]
    expected = logits.softmax(-1).numpy() * 4000
    many = expected > 20
    assert many.sum() > 20
    statistic = float(((counts[many] - expected[many]) ** 2 / expected[many]).sum())
    # The 1e-6 quantile, by the cube-root approximation.
    assert statistic < many.sum() * (1 - 2 / (9 * many.sum()) + 4.75 * (2 / (9 * many.sum())) ** 0.5) ** 3


def test_calls_under_way_together_share_the_engine(served: Any) -> None:
    async def two() -> list[Any]:
        first = asyncio.create_task(collect(served, [ask("x", [5], 3, max_tokens=30)]))
        second = asyncio.create_task(collect(served, [ask("x", [5], 3, max_tokens=30)]))
        return [await first, await second]

    one, two_ = asyncio.run(two())
    assert tokens_of(one) == tokens_of(two_)
    assert len(one) == 3


@pytest.mark.parametrize(
    ("request_", "fault"),
    [
        (ask("x", []), "a prompt of 0 tokens"),
        (ask("x", [5] * 128), "a prompt of 128 tokens; expected 1 to 127"),
        (ask("x", [128]), "the model knows 0 to 127"),
        (ask("x", [5], 0), "n 0; expected 1 or more"),
        (ask("x", [5], top_p=0.0), "top_p 0.0"),
    ],
)
def test_requests_that_make_no_sense_are_refused_and_leave_nothing_behind(
    served: Any, request_: Any, fault: str
) -> None:
    with pytest.raises(ConfigError, match=fault):
        run(served, [ask("fine", [5]), request_])
    assert not served.samples
    assert len(run(served, [ask("x", [5], 2)])) == 2


VARIANTS = {
    "tied llama": {"architecture": "llama", "tied": True, "seed": 3},
    "qwen3, padded vocabulary": {"architecture": "qwen3", "vocab_size": 131, "seed": 4},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_other_models_are_exact_before_and_after_an_update(tmp_path: Path, variant: str) -> None:
    folder = write_tiny_model(tmp_path / "model", **VARIANTS[variant])
    engine, plain = make_engine(folder), plain_model(folder)
    try:
        requests = [ask(str(at), [5, 6, at + 7], 3, max_tokens=20) for at in range(3)]
        assert worst(plain, requests, run(engine, requests)) < EXACT
        state = changed(state_of(plain), 1)
        engine.update_weights(whole_shards(state), 1)
        for name, parameter in state_of(plain).items():
            parameter.copy_(state[name])
        assert worst(plain, requests, run(engine, requests)) < EXACT
    finally:
        engine.close()


def test_a_model_that_sglang_would_serve_without_some_of_its_tensors_is_refused(tmp_path: Path) -> None:
    """Of its Llama it loads no biases, and says nothing."""
    folder = write_tiny_model(tmp_path / "model", architecture="llama", attention_bias=True, mlp_bias=True)
    with pytest.raises(ConfigError, match=r"bias' could not be followed into the engine"):
        make_engine(folder)


def test_bfloat16_serves_what_it_was_sent_rounded(tmp_path: Path, qwen2: Path) -> None:
    engine, plain = make_engine(qwen2, dtype="bfloat16"), plain_model(qwen2, "bfloat16")
    try:
        requests = [ask(str(at), [5, 6, at + 7], 3, max_tokens=20) for at in range(3)]
        assert worst(plain, requests, run(engine, requests)) < 0.15
        state = changed({name: tensor.float() for name, tensor in state_of(plain).items()}, 1)
        engine.update_weights(whole_shards(state), 1)
        for name, parameter in state_of(plain).items():
            parameter.copy_(state[name])
        assert worst(plain, requests, run(engine, requests)) < 0.15
    finally:
        engine.close()
