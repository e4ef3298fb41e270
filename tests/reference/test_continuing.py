"""Samples of a group that are requested alone, and samples that continue behind tokens that exist already."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rollout_cases import ask, assert_exact, changed, collect, halves, make_engine, run, tokens_of

from rlsdk.interfaces import ConfigError, FinishReason, GenerationRequest, VersionRun
from rlsdk.kit.model.hf import load_tokenizer


def continued(request: GenerationRequest, index: int, tokens: list[int]) -> GenerationRequest:
    return replace(request, n=1, first_sample=index, response_ids=tuple(tokens))


def test_one_sample_of_a_group_is_the_same_when_it_is_requested_alone(served: Any) -> None:
    request = ask("x", [5, 6, 7], 5, max_tokens=12, stop_token_ids=(), temperature=1.3)
    group = tokens_of(run(served, [request]))
    assert len({tuple(tokens) for tokens in group.values()}) == 5
    some = run(served, [replace(request, first_sample=3, n=2), ask("other", [9], 3)])
    assert {key: tokens for key, tokens in tokens_of(some).items() if key[0] == "x"} == {
        ("x", 3): group["x", 3],
        ("x", 4): group["x", 4],
    }


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1.7])
def test_a_sample_continues_with_the_tokens_that_it_would_have_had(served: Any, plain: Any, temperature: float) -> None:
    request = ask("x", [5, 6, 7], 3, max_tokens=16, stop_token_ids=(), temperature=temperature, top_k=40)
    whole = tokens_of(run(served, [request]))
    for (_, index), tokens in whole.items():
        for cut in (1, 7, 15):
            (rest,) = run(served, [continued(request, index, tokens[:cut])])
            assert (rest.sample_index, rest.finish_reason) == (index, FinishReason.LENGTH)
            assert rest.token_ids.tolist() == tokens[cut:]
            assert rest.versions == (VersionRun(0, 16 - cut),)
            assert_exact(plain, [5, 6, 7, *tokens[:cut]], rest, temperature)


def test_the_room_that_is_left_counts_what_there_is(served: Any) -> None:
    most = served.spec.max_model_tokens
    request = ask("x", list(range(5, 5 + most - 10)), max_tokens=40, stop_token_ids=())
    (rest,) = run(served, [continued(request, 0, [4, 5, 6])])
    assert (len(rest.token_ids), rest.finish_reason) == (7, FinishReason.LENGTH)
    for wrong, fault in (
        (continued(request, 0, [4] * 10), "response_ids of 10 tokens behind a prompt of 54 leave no room"),
        (continued(ask("x", [5], max_tokens=3), 0, [4, 5, 6]), "leave no room for one more: max_tokens is 3"),
        (continued(ask("x", [5]), 0, [served.vocabulary]), "response_ids from"),
        (replace(ask("x", [5]), first_sample=-1), "first_sample -1; expected 0 or more"),
    ):
        with pytest.raises(ConfigError, match=fault):
            run(served, [wrong])


def test_a_stop_string_is_found_where_it_begins_in_what_there_is(served: Any) -> None:
    decode = load_tokenizer(served.spec.model.path).decode
    request = ask("x", [5, 6], max_tokens=20, stop_token_ids=())
    (free,) = run(served, [request])
    tokens = free.token_ids.tolist()
    first, second = decode(tokens[:8]), decode(tokens[:12])
    straddling = second[len(first) - 2 :]
    ends = next(at for at in range(1, 21) if straddling in decode(tokens[:at]))
    assert ends > 8, "the string came before the border: choose another seed"
    stopping = replace(request, sampling=replace(request.sampling, stop_strings=(straddling,)))
    (rest,) = run(served, [continued(stopping, 0, tokens[:8])])
    assert (rest.token_ids.tolist(), rest.finish_reason) == (tokens[8:ends], FinishReason.STOP)


def test_an_aborted_sample_continues_on_another_replica(qwen2: Path) -> None:
    """Its index and tokens are all that moves: an abort, a pause with new keys and values, and the rest elsewhere."""
    here, there = make_engine(qwen2), make_engine(qwen2, rank=1, seed=5)
    request = ask("x", [5, 6, 7], 4, max_tokens=30, stop_token_ids=())
    whole = tokens_of(run(here, [request]))

    async def aborted() -> list[Any]:
        task = asyncio.create_task(collect(here, [request]))
        for _ in range(9):
            await asyncio.sleep(0)
        here.abort()
        return await task

    parts = tokens_of(asyncio.run(aborted()))
    assert all(0 < len(tokens) < 30 for tokens in parts.values())
    moved = [replace(continued(request, key[1], tokens), request_id=str(key[1])) for key, tokens in parts.items()]
    rest = {output.sample_index: output.token_ids.tolist() for output in run(there, moved)}
    assert {key: tokens + rest[key[1]] for key, tokens in parts.items()} == whole


def test_a_continued_sample_survives_an_update_in_a_pause(qwen2: Path) -> None:
    """Keys and values are computed again for prompt, given tokens and new ones: the border is not forgotten."""
    engine = make_engine(qwen2)
    prompt, prior = [5, 6], [9, 10, 11, 12]
    request = replace(ask("x", prompt, 3, max_tokens=20, stop_token_ids=()), response_ids=tuple(prior))

    async def updated() -> list[Any]:
        task = asyncio.create_task(collect(engine, [request]))
        for _ in range(6):
            await asyncio.sleep(0)
        engine.pause()
        await asyncio.sleep(0.03)
        engine.update_weights(iter(halves(changed(engine, 1))), 2)
        engine.update_weights(iter(halves(changed(engine, 2))), 5)
        engine.resume()
        return await task

    for output in asyncio.run(updated()):
        assert [run.version for run in output.versions] == [0, 5]
        old = output.versions[0].num_tokens
        assert sum(run.num_tokens for run in output.versions) == len(output.token_ids) == 16
        # Under the weights that are served now, one pass over all that came before gives what was sampled after it.
        tokens = output.token_ids.tolist()
        later = replace(output, token_ids=output.token_ids[old:], log_probs=output.log_probs[old:])
        assert_exact(engine.model, [*prompt, *prior, *tokens[:old]], later)


def test_decoded_tokens_are_counted_whoever_asks(qwen2: Path) -> None:
    engine = make_engine(qwen2)
    assert engine.num_decoded() == 0
    run(engine, [ask("x", [5], 3, max_tokens=10, stop_token_ids=())])
    assert engine.num_decoded() == 30
    counts = []

    async def watched() -> None:
        async for _ in engine.generate([ask("x", [5], 2, max_tokens=10, stop_token_ids=())]):
            counts.append(engine.num_decoded())

    asyncio.run(watched())
    assert counts[-1] == 50
    run(engine, [replace(ask("x", [5], 1, max_tokens=10, stop_token_ids=()), response_ids=(7, 8, 9))])
    assert engine.num_decoded() == 57
