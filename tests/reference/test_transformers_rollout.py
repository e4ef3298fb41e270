"""The rollout engine against plain forward passes of the same model, and against the contract's words."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM

from rlsdk.interfaces import (
    Box,
    ConfigError,
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    ModelSpec,
    RankContext,
    RolloutSpec,
    SamplingParams,
    WeightShard,
    WeightSyncError,
    fingerprint,
)
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine
from rlsdk.testing.models import write_tiny_model

STOP = 1
EXACT = 2e-6


@pytest.fixture(scope="module", params=["qwen2", "llama", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp(request.param) / "m"
    return write_tiny_model(target, architecture=request.param, tied=request.param == "llama")


@pytest.fixture(scope="module")
def engine(folder: Path) -> TransformersRolloutEngine:
    made = TransformersRolloutEngine()
    spec = RolloutSpec(model=ModelSpec(path=str(folder)), max_model_tokens=64, max_running=7)
    made.initialize(RankContext(role="rollout"), spec)
    return made


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def run(engine: TransformersRolloutEngine, requests: Sequence[GenerationRequest]) -> list[GenerationOutput]:
    async def collect() -> list[GenerationOutput]:
        return [output async for output in engine.generate(requests)]

    return asyncio.run(collect())


def ask(name: str, prompt: Sequence[int], n: int = 1, **sampling: Any) -> GenerationRequest:
    params = SamplingParams(**{"max_tokens": 8, "stop_token_ids": (STOP,), "seed": 7, **sampling})
    return GenerationRequest(request_id=name, prompt_ids=tuple(prompt), n=n, sampling=params)


def distributions(plain: Any, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """`[L, V]` log-probs of each position of the response, from one pass over the whole row."""
    with torch.no_grad():
        logits = plain(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)


PROMPT = st.lists(st.integers(4, 120), min_size=1, max_size=20)
SAMPLING = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.6, 1.0, 1.5]),
        "top_k": st.sampled_from([0, 1, 5]),
        "top_p": st.sampled_from([1.0, 0.8, 0.1]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "max_tokens": st.integers(1, 12),
        "seed": st.integers(0, 2**63 - 1),
    }
)


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(PROMPT, SAMPLING, st.integers(1, 4)), min_size=1, max_size=6))
def test_every_sample_is_what_its_own_request_asked_for(
    engine: TransformersRolloutEngine, plain: Any, asked: list[tuple[list[int], dict[str, Any], int]]
) -> None:
    requests = [ask(str(at), prompt, n, **sampling) for at, (prompt, sampling, n) in enumerate(asked)]
    outputs = run(engine, requests)
    assert Counter((o.request_id, o.sample_index) for o in outputs) == Counter(
        (request.request_id, index) for request in requests for index in range(request.n)
    )
    for output in outputs:
        prompt, sampling, _ = asked[int(output.request_id)]
        tokens = output.token_ids.tolist()
        logs = distributions(plain, prompt, tokens, sampling["temperature"] or 1.0)
        chosen = logs[range(len(tokens)), tokens]
        assert torch.allclose(torch.from_numpy(output.log_probs), chosen, atol=EXACT, rtol=1e-5)
        assert 1 <= len(tokens) <= sampling["max_tokens"]
        assert STOP not in tokens[:-1]
        stopped = tokens[-1] == STOP
        assert output.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        assert stopped or len(tokens) == sampling["max_tokens"]
        if sampling["temperature"] == 0:
            assert torch.allclose(chosen, logs.amax(-1), atol=EXACT)
        for row, token in zip(logs.exp(), tokens, strict=True):
            assert_kept(row, token, sampling)


def assert_kept(probs: torch.Tensor, token: int, sampling: dict[str, Any]) -> None:
    """The token is among those that top-k, top-p and min-p leave, re-derived by sorting."""
    if sampling["temperature"] == 0:
        return
    better = probs[probs > probs[token] + 1e-7]
    if sampling["top_k"]:
        assert len(better) < sampling["top_k"]
    kept = probs.sort(descending=True).values[: sampling["top_k"] or None].sum()
    assert better.sum() <= sampling["top_p"] * kept + 1e-5 or len(better) == 0
    assert probs[token] >= sampling["min_p"] * probs.max() - 1e-6


def test_a_seeded_sample_does_not_depend_on_the_batch_around_it(engine: TransformersRolloutEngine) -> None:
    requests = [ask(str(at), [4 + at % 90, 9, 30 + at % 7], 3, seed=at) for at in range(30)]
    together = {(o.request_id, o.sample_index): o.token_ids.tolist() for o in run(engine, requests)}
    alone = {(o.request_id, o.sample_index): o.token_ids.tolist() for r in requests for o in run(engine, [r])}
    assert together == alone
    assert len(set(map(tuple, together.values()))) > 80
    other = run(engine, [replace(r, sampling=replace(r.sampling, seed=1000 + at)) for at, r in enumerate(requests)])
    assert {(o.request_id, o.sample_index): o.token_ids.tolist() for o in other} != together


@pytest.mark.parametrize("filters", [{}, {"temperature": 0.7}, {"top_k": 6}, {"top_p": 0.5}, {"min_p": 0.2}])
def test_first_tokens_follow_the_exact_distribution(
    engine: TransformersRolloutEngine, plain: Any, filters: dict[str, Any]
) -> None:
    """Chi-square with the seed fixed; a right sampler fails one seed in ten thousand."""
    prompt, n = [5, 17, 40], 4000
    probs = distributions(plain, prompt, [0], filters.get("temperature", 1.0))[0].exp().double()
    order = probs.argsort(descending=True)
    keep = torch.ones_like(probs, dtype=torch.bool)
    if "top_k" in filters:
        keep[order[filters["top_k"] :]] = False
    if "top_p" in filters:
        before = probs[order].cumsum(0) - probs[order]
        keep[order[before >= filters["top_p"]]] = False
    if "min_p" in filters:
        keep &= probs >= filters["min_p"] * probs.max()
    expected = torch.where(keep, probs, 0.0) / probs[keep].sum() * n
    engine.spec, before_spec = replace(engine.spec, max_running=4000), engine.spec
    outputs = run(engine, [ask("x", prompt, n, max_tokens=1, seed=11, **filters)])
    engine.spec = before_spec
    counts = torch.bincount(torch.tensor([int(o.token_ids[0]) for o in outputs]), minlength=len(probs)).double()
    assert counts[~keep].sum() == 0
    common = expected >= 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    wanted = torch.cat([expected[common], expected[~common].sum()[None]])
    if wanted[-1] < 1e-9:
        observed, wanted = observed[:-1], wanted[:-1]
    assert len(observed) == 1 or chisquare(observed.numpy(), wanted.numpy()).pvalue > 1e-4


def test_a_stop_string_ends_a_response_with_the_token_that_completes_it(engine: TransformersRolloutEngine) -> None:
    free = run(engine, [ask("a", [5, 6], max_tokens=20, stop_token_ids=())])[0]
    tokenizer = AutoTokenizerOf(engine)
    ids = free.token_ids.tolist()
    wanted = tokenizer.decode(ids)[3:5]
    completes = next(at for at in range(1, 21) if wanted in tokenizer.decode(ids[:at]))
    stopped = run(engine, [ask("a", [5, 6], max_tokens=20, stop_token_ids=(), stop_strings=(wanted,))])[0]
    assert stopped.token_ids.tolist() == ids[:completes]
    assert stopped.finish_reason is FinishReason.STOP


def AutoTokenizerOf(engine: TransformersRolloutEngine) -> Any:  # noqa: N802
    from rlsdk.kit.hf import load_tokenizer

    return load_tokenizer(engine.spec.model.path)


@pytest.mark.parametrize("length", [0, 64, 65])
def test_prompts_without_a_token_or_without_room_are_refused(engine: TransformersRolloutEngine, length: int) -> None:
    with pytest.raises(ConfigError, match=r"expected 1 to 63"):
        run(engine, [ask("x", [5] * length)])


def test_the_longest_prompt_has_room_for_one_token(engine: TransformersRolloutEngine) -> None:
    (output,) = run(engine, [ask("x", [5] * 63, max_tokens=50, stop_token_ids=())])
    assert len(output.token_ids) == 1
    assert output.finish_reason is FinishReason.LENGTH


def test_abort_from_another_thread_gives_what_there_is(engine: TransformersRolloutEngine) -> None:
    requests = [ask(str(at), [5, 6, at + 4], 5, max_tokens=55, stop_token_ids=()) for at in range(8)]
    outputs: list[GenerationOutput] = []

    async def collect() -> None:
        async for output in engine.generate(requests):
            outputs.append(output)

    thread = threading.Thread(target=lambda: asyncio.run(collect()))
    thread.start()
    while not engine.calls:
        pass
    engine.abort(["1"])
    engine.abort()
    thread.join(60)
    assert not thread.is_alive()
    assert len(outputs) == 40
    aborted = [o for o in outputs if o.finish_reason is FinishReason.ABORT]
    assert aborted
    assert all(len(o.token_ids) == len(o.log_probs) < 55 for o in aborted)


def shards(state: dict[str, torch.Tensor]) -> list[WeightShard]:
    """Every tensor in two pieces, where it has two rows."""
    found = []
    for name, tensor in state.items():
        whole = Box.whole(tuple(tensor.shape))
        middle = tensor.shape[0] // 2
        low = Box(whole.offset, (middle, *whole.size[1:]))
        high = Box((middle, *whole.offset[1:]), (tensor.shape[0] - middle, *whole.size[1:]))
        found += [WeightShard(name=name, box=box, tensor=tensor[box.slices(whole)]) for box in (low, high)]
    return found


def fresh(folder: Path, *, load: bool = True) -> TransformersRolloutEngine:
    made = TransformersRolloutEngine()
    spec = RolloutSpec(model=ModelSpec(path=str(folder)), max_model_tokens=64, load_weights=load)
    made.initialize(RankContext(role="rollout"), spec)
    return made


def changed(plain: Any, engine: TransformersRolloutEngine, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    state = plain.state_dict()
    noise = {name: torch.randn(state[name].shape, generator=generator) for name in engine.parameters}
    return {name: state[name] + 0.02 * noise[name] for name in engine.parameters}


def test_an_update_is_served_whole_and_its_receipt_is_of_what_is_served(folder: Path, plain: Any) -> None:
    engine = fresh(folder, load=False)
    with pytest.raises(WeightSyncError, match="no weights have come"):
        run(engine, [ask("x", [5])])
    for version in (3, 4):
        state = changed(plain, engine, version)
        receipt = engine.update_weights(iter(shards(state)), version)
        assert receipt.version == version
        assert receipt.num_tensors == len(state)
        assert receipt.num_bytes == sum(t.numel() * 4 for t in state.values())
        for name, tensor in state.items():
            assert receipt.fingerprints[name] == fingerprint(tensor, Box.whole(tuple(tensor.shape)))
        other = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        other.load_state_dict(state, strict=False)
        other.tie_weights()
        for output in run(engine, [ask(str(version), [5, 9, 12], 4)]):
            logs = distributions(other, [5, 9, 12], output.token_ids.tolist())
            expected = logs[range(len(output.token_ids)), output.token_ids.tolist()]
            assert torch.allclose(torch.from_numpy(output.log_probs), expected, atol=EXACT, rtol=1e-5)
            assert output.policy_version == output.last_policy_version == version


@pytest.mark.parametrize("damage", ["missing", "unknown", "shape", "breaks off"])
def test_a_failed_update_serves_nothing_until_a_whole_one_comes(folder: Path, plain: Any, damage: str) -> None:
    engine = fresh(folder)
    state = changed(plain, engine)
    pieces = shards(state)

    def broken() -> Any:
        if damage == "missing":
            yield from pieces[:-1]
        elif damage == "unknown":
            yield replace(pieces[0], name="nobody")
        elif damage == "shape":
            yield replace(pieces[0], tensor=pieces[0].tensor[:, :3])
        else:
            yield from pieces[:4]
            raise OSError("the line is dead")

    with pytest.raises((WeightSyncError, OSError)):
        engine.update_weights(broken(), 9)
    with pytest.raises(WeightSyncError, match="failed half-way"):
        run(engine, [ask("x", [5])])
    engine.update_weights(iter(pieces), 10)
    assert run(engine, [ask("x", [5])])[0].policy_version == 10


def test_sleep_at_level_2_gives_memory_back_and_wakes_for_an_update(folder: Path, plain: Any) -> None:
    engine = fresh(folder)
    before = [o.token_ids.tolist() for o in run(engine, [ask("x", [5, 6], 3)])]
    state = {name: parameter.clone() for name, parameter in engine.parameters.items()}
    engine.sleep(2)
    assert sum(p.untyped_storage().nbytes() for p in engine.parameters.values()) == 0
    with pytest.raises(WeightSyncError, match="asleep"):
        run(engine, [ask("x", [5])])
    engine.wake(("weights",))
    engine.update_weights(iter(shards(state)), 1)
    engine.wake(("kv_cache",))
    assert [o.token_ids.tolist() for o in run(engine, [ask("x", [5, 6], 3)])] == before


def test_two_requests_of_one_name_are_refused(engine: TransformersRolloutEngine) -> None:
    with pytest.raises(ConfigError, match="same request_id"):
        run(engine, [ask("x", [5]), ask("x", [6])])
