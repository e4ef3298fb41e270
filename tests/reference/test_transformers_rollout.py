"""The rollout engine against plain forward passes of the same model, and against the contract's words."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_cases import STOP, ask, assert_exact, collect, distributions, make_engine, run, tokens_of

from rlsdk.interfaces import ConfigError, FinishReason, GenerationOutput, Head, ModelSpec, RlsdkError
from rlsdk.kit.model.hf import load_tokenizer
from rlsdk.reference.lockstep import LockstepRows
from rlsdk.testing.process.models import write_tiny_model
from rlsdk.testing.process.reference import load_plain_model

PROMPT = st.lists(st.integers(4, 120), min_size=1, max_size=20)
SAMPLING = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.6, 1.0, 1.5]),
        "top_k": st.sampled_from([0, 1, 5]),
        "top_p": st.sampled_from([1.0, 0.8, 0.1]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "max_tokens": st.integers(1, 12),
        "stop_token_ids": st.sampled_from([(), (STOP,), (STOP, 50, 60)]),
        "seed": st.integers(0, 2**63 - 1),
    }
)
ASKED = st.lists(st.tuples(PROMPT, SAMPLING, st.integers(1, 9)), min_size=1, max_size=6)


def assert_kept(probs: torch.Tensor, token: int, sampling: dict[str, Any]) -> None:
    """The token is among those that top-k, top-p and min-p leave, derived once more by sorting."""
    better = probs[probs > probs[token] + 1e-7]
    if sampling["top_k"]:
        assert len(better) < sampling["top_k"]
    kept = probs.sort(descending=True).values[: sampling["top_k"] or None].sum()
    assert better.sum() <= sampling["top_p"] * kept + 1e-5 or len(better) == 0
    assert probs[token] >= sampling["min_p"] * probs.max() - 1e-6


def check_samples(
    plain: Any, asked: Sequence[tuple[list[int], dict[str, Any], int]], outputs: Sequence[GenerationOutput]
) -> None:
    """Every sample once; each exact, within its filters, ended where and as its request says."""
    assert Counter((o.request_id, o.sample_index) for o in outputs) == Counter(
        (str(at), index) for at, (_, _, n) in enumerate(asked) for index in range(n)
    )
    for output in outputs:
        prompt, sampling, _ = asked[int(output.request_id)]
        tokens, stops = output.token_ids.tolist(), sampling["stop_token_ids"]
        assert output.token_ids.dtype == np.int64
        assert output.log_probs.dtype == np.float32
        assert_exact(plain, prompt, output, sampling["temperature"])
        assert 1 <= len(tokens) <= sampling["max_tokens"]
        assert not set(tokens[:-1]) & set(stops)
        stopped = tokens[-1] in stops
        assert output.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        assert stopped or len(tokens) == sampling["max_tokens"]
        logs = distributions(plain, prompt, tokens, sampling["temperature"] or 1.0)
        for row, token in zip(logs.exp(), tokens, strict=True):
            if sampling["temperature"] == 0:
                assert row[token] >= row.max() - 1e-6
            else:
                assert_kept(row, token, sampling)


@settings(deadline=None, max_examples=40)
@given(ASKED)
def test_every_sample_is_what_its_own_request_asked_for(
    served: Any, plain: Any, asked: list[tuple[list[int], dict[str, Any], int]]
) -> None:
    requests = [ask(str(at), prompt, n, **sampling) for at, (prompt, sampling, n) in enumerate(asked)]
    check_samples(plain, asked, run(served, requests))


MIXED: list[tuple[list[int], dict[str, Any], int]] = [
    (
        [(7 * at + 3 * i) % 110 + 5 for i in range(length)],
        {
            "temperature": (1.0, 0.7, 0.0)[at % 3],
            "top_k": (0, 6)[at % 2],
            "top_p": (1.0, 0.9)[at % 2],
            "min_p": 0.0,
            "max_tokens": 3 + 4 * at,
            "stop_token_ids": (STOP, 40 + at),
            "seed": at,
        },
        n,
    )
    for at, (length, n) in enumerate([(3, 4), (11, 1), (3, 2), (30, 5), (1, 3), (12, 2)])
]
"""Prompts, limits and parameters of every kind, more samples than run at once, longer than a window of 8."""
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tied": True},
    "qwen3": {},
    "gpt2": {},
    "gemma2": {"sliding_window": 8, "num_hidden_layers": 3},
    "gpt_oss": {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mistral": {"sliding_window": 8},
    "deepseek_v3": {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 32,
    },
    "qwen3_next": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_hidden_layers": 4,
    },
    "bloom": {},
}
"""Tied embeddings, query norms, learned positions, capped scores and logits, attention sinks, windows, latent
attention, recurrent layers, biases in place of positions."""


def write_model(folder: Path, family: str, fields: dict[str, Any]) -> Path:
    if family in ("llama", "qwen3"):
        return write_tiny_model(folder, architecture=family, **fields)
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    shape = {"vocab_size": 128, "hidden_size": 64, "num_attention_heads": 4, "pad_token_id": 0, **fields}
    if family not in ("gpt2", "bloom"):
        shape |= {"intermediate_size": 96, "num_key_value_heads": 2, "num_hidden_layers": 2, **fields}
    if family not in ("gpt2", "bloom", "deepseek_v3"):
        shape["head_dim"] = 16
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**shape))
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.08)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_attention_is_exact(tmp_path: Path, family: str) -> None:
    folder = write_model(tmp_path, family, FAMILIES[family])
    engine = make_engine(folder)
    assert isinstance(engine.decoder.memory, LockstepRows) == (family in ("qwen3_next", "bloom"))
    requests = [ask(str(at), prompt, n, **sampling) for at, (prompt, sampling, n) in enumerate(MIXED)]
    check_samples(load_plain_model(str(folder)), MIXED, run(engine, requests))


def test_a_model_in_bfloat16_gives_log_probs_of_its_own_logits(qwen2: Path, plain: Any) -> None:
    engine = make_engine(qwen2, dtype="bfloat16")
    for output in run(engine, [ask("x", [5, 6, 7], 5)]):
        tokens = output.token_ids.tolist()
        expected = distributions(plain, [5, 6, 7], tokens)[range(len(tokens)), tokens]
        assert torch.allclose(torch.from_numpy(output.log_probs), expected, atol=0.2)
        assert output.log_probs.dtype == np.float32


def test_a_seeded_sample_does_not_depend_on_the_batch_around_it(qwen2: Path) -> None:
    engine = make_engine(qwen2, max_running=64)
    requests = [
        ask(str(at), [4 + at % 90, *range(9, 9 + at % 5), 30 + at % 7], 4, seed=at, max_tokens=12, stop_token_ids=())
        for at in range(64)
    ]
    together = tokens_of(run(engine, requests))
    alone = {key: tokens for request in requests for key, tokens in tokens_of(run(engine, [request])).items()}
    backwards = tokens_of(run(make_engine(qwen2, max_running=9), requests[::-1]))
    assert together == alone == backwards
    assert len(set(map(tuple, together.values()))) > 250


def test_samples_of_a_request_do_not_depend_on_how_many_there_are(served: Any) -> None:
    few, many = (tokens_of(run(served, [ask("x", [5, 6], n)])) for n in (2, 9))
    assert few.items() <= many.items()
    assert len(set(map(tuple, many.values()))) > 5


def test_a_filter_of_one_request_leaves_the_others_as_they_are(served: Any) -> None:
    request = ask("x", [5, 6, 7], 6, max_tokens=12)
    other = ask("y", [8, 9], 1, top_p=0.5, top_k=3, min_p=0.1, temperature=0.3)
    alone, together = tokens_of(run(served, [request])), tokens_of(run(served, [request, other]))
    assert alone.items() <= together.items()


def test_without_a_seed_every_call_is_new_and_every_run_repeats(qwen2: Path) -> None:
    def two_calls(**where: int) -> list[dict[tuple[str, int], list[int]]]:
        engine = make_engine(qwen2, **where)
        return [tokens_of(run(engine, [ask(name, [5, 6], 3, seed=None) for name in "ab"])) for _ in range(2)]

    first, second = two_calls(seed=3)
    assert first != second
    assert first["a", 0] != first["b", 0]
    assert two_calls(seed=3) == [first, second]
    assert two_calls(seed=4)[0] != first
    assert two_calls(seed=3, rank=1)[0] != first


def test_a_negative_seed_and_one_of_many_bits_are_seeds_too(served: Any) -> None:
    found = [tokens_of(run(served, [ask("x", [5], 3, seed=seed)])) for seed in (-1, 2**64 - 2, 2**80 + 5, 5)]
    assert found[0] != found[1]
    assert found[2] == found[3]  # modulo 2**64


@pytest.mark.parametrize("length", [0, 64, 65])
def test_prompts_without_a_token_or_without_room_are_refused(served: Any, length: int) -> None:
    with pytest.raises(ConfigError, match=rf"'x': a prompt of {length} tokens; expected 1 to 63"):
        run(served, [ask("ok", [5]), ask("x", [5] * length)])


def test_the_longest_prompt_has_room_for_one_token(served: Any, plain: Any) -> None:
    (output,) = run(served, [ask("x", [5] * 63, max_tokens=50, stop_token_ids=())])
    assert len(output.token_ids) == 1
    assert output.finish_reason is FinishReason.LENGTH
    assert_exact(plain, [5] * 63, output)


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"max_tokens": 0}, r"max_tokens 0; expected 1 or more"),
        ({"temperature": -1.0}, r"temperature -1.0; expected 0 \(greedy\) or more"),
        ({"temperature": float("nan")}, r"temperature nan; expected"),
        ({"top_p": 0.0}, r"top_p 0.0; expected above 0, up to 1"),
        ({"top_k": -1}, r"top_k -1; expected 0 \(off\) or more"),
        ({"min_p": 1.5}, r"min_p 1.5; expected 0 \(off\) to 1"),
        ({"stop_strings": ("",)}, r"stop_strings \(''.\); expected no empty string"),
    ],
)
def test_sampling_that_makes_no_sense_is_refused(served: Any, fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=f"request 'x': {fault}"):
        run(served, [ask("x", [5], **fields)])


def test_unknown_tokens_no_samples_and_twice_the_same_name_are_refused(served: Any) -> None:
    with pytest.raises(ConfigError, match=r"prompt_ids from 5 to 128; the model knows 0 to 127"):
        run(served, [ask("x", [5, 128])])
    with pytest.raises(ConfigError, match=r"n 0; expected 1 or more"):
        run(served, [ask("x", [5], 0)])
    with pytest.raises(ConfigError, match=r"two requests have the request_id 'x'"):
        run(served, [ask("x", [5]), ask("x", [6])])
    assert run(served, []) == []


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"engine_kwargs": {"speed": 1}}, r"no constructor of its own to pass \['speed'\] to"),
        ({"tp_size": 2}, r"tp_size 2 must be 1"),
        ({"max_running": 0}, r"max_running 0: expected 1 or more"),
        ({"max_model_tokens": 1}, r"max_model_tokens 1: expected 2 or more"),
    ],
)
def test_specs_that_cannot_be_served_are_refused(qwen2: Path, fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        make_engine(qwen2, **fields)


def test_a_head_that_gives_no_tokens_is_refused(served: Any) -> None:
    spec = replace(served.spec, model=ModelSpec(path=served.spec.model.path, head=Head.VALUE))
    with pytest.raises(ConfigError, match="head 'lm', not 'value'"):
        type(served.engine)().initialize(served.ctx, spec)


def test_stop_strings_end_a_response_with_the_token_that_completes_them(served: Any) -> None:
    tokenizer = load_tokenizer(served.spec.model.path)
    (free,) = run(served, [ask("a", [5, 6], max_tokens=20, stop_token_ids=())])
    ids = free.token_ids.tolist()
    text = tokenizer.decode(ids)
    for wanted in (text[0], text[3:5], text[2:9], text[10:]):
        completes = next(at for at in range(1, 21) if wanted in tokenizer.decode(ids[:at]))
        request = ask("a", [5, 6], max_tokens=20, stop_token_ids=(), stop_strings=("not there", wanted))
        stopped, other = run(served, [request, ask("b", [5, 6], max_tokens=20, stop_token_ids=())])
        assert {stopped.request_id, other.request_id} == {"a", "b"}
        stopped, other = (stopped, other) if stopped.request_id == "a" else (other, stopped)
        assert stopped.token_ids.tolist() == ids[:completes]
        assert stopped.finish_reason is FinishReason.STOP
        assert other.token_ids.tolist() == ids


def test_a_model_without_a_tokenizer_serves_all_but_stop_strings(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    engine = make_engine(folder)
    assert len(run(engine, [ask("x", [5], 2)])) == 2
    with pytest.raises(ConfigError, match="no tokenizer could be loaded"):
        run(engine, [ask("x", [5], stop_strings=("a",))])
    assert len(run(engine, [ask("x", [5], 2)])) == 2


def test_logits_that_are_not_finite_are_an_error_and_not_a_sample(qwen2: Path) -> None:
    engine = make_engine(qwen2)
    next(iter(engine.parameters.values())).fill_(float("nan"))
    with pytest.raises(RlsdkError, match="the model gives logits that are not finite, with the weights of version 0"):
        run(engine, [ask("x", [5], 2)])


def test_an_engine_that_was_closed_says_so(qwen2: Path) -> None:
    engine = make_engine(qwen2)
    engine.close()
    engine.close()
    with pytest.raises(RlsdkError, match="the engine was closed"):
        run(engine, [ask("x", [5])])


@pytest.mark.parametrize("paused", [False, True])
def test_closing_ends_what_runs_with_an_error(qwen2: Path, paused: bool) -> None:
    engine = make_engine(qwen2)

    async def close_midway() -> None:
        task = asyncio.create_task(collect(engine, [ask("x", [5], max_tokens=30, stop_token_ids=())]))
        for _ in range(5):
            await asyncio.sleep(0)
        if paused:
            engine.pause()
        engine.close()
        with pytest.raises(RlsdkError, match="the engine was closed"):
            await task

    asyncio.run(close_midway())


def test_samples_come_as_they_finish_and_not_all_at_the_end(served: Any) -> None:
    async def watch() -> list[str]:
        seen = []
        async for output in served.generate(
            [ask("long", [5], max_tokens=30, stop_token_ids=()), ask("short", [6], max_tokens=1)]
        ):
            seen.append((output.request_id, len(served.decoder.jobs)))
        return [name for name, _ in seen]

    assert asyncio.run(watch()) == ["short", "long"]


def test_the_event_loop_turns_while_samples_are_made(served: Any) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def both() -> None:
        counter = asyncio.create_task(count())
        await collect(served, [ask("x", [5], max_tokens=30, stop_token_ids=())])
        counter.cancel()

    asyncio.run(both())
    assert turns >= 30
